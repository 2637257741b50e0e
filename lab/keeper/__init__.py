"""The processes of a lab: the reaper, the keeper (its PID 1), and the first one of each node."""
