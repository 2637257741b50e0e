"""What a health check is, the passive checks, a node's verdict. Standard library and pynvml."""
