"""The heartbeat phase of a rank that stands after a step, as it was ordered to."""

PHASE = "stand"
