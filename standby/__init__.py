"""robust-standby: size, create and show the pool of standby nodes."""
