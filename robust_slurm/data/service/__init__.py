"""The data process of a node: prepares steps ahead, and outlives the ranks."""
