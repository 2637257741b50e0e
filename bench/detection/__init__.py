"""The time until a lost node is seen, and the healthy nodes that are taken for lost."""
