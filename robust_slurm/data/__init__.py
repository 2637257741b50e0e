"""Data that survives: the same samples in the same order, whatever dies (decision 87)."""
