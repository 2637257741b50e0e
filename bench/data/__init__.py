"""Data loading beside others': throughput, balance, memory, restarts, and nothing lost."""
