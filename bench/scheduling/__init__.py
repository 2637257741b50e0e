"""The time that a job waits for machines, by the size of the pool."""
