"""``robust-standby simulate``: the time that a job of N nodes would lose to faults, by cause."""
