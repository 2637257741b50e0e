"""robust-status: what the nodes and the robust jobs are doing, for people and for programs."""
