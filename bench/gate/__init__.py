"""The cost of the node gate before a healthy job."""
