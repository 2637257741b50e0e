"""The form of a health check, the passive checks, a node's verdict. Standard library and pynvml."""
