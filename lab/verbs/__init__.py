"""The faults that a lab makes, as methods of `Lab` and as words of its command line."""
