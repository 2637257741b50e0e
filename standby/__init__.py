"""robust-standby: size, simulate, create and show the pool of standby nodes."""
