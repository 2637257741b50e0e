"""``robust-standby simulate``: what a job of N nodes would lose to faults, and to what of them."""
