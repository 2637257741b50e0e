"""What a health check is, the passive checks, the verdict of a node. Standard library and pynvml."""
