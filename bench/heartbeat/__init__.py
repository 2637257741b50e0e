"""The cost of heartbeats, for the rank and for the supervisor of 10,000 ranks."""
