"""robust-standby: how many standby nodes, which, and where they wait."""
