"""Kinds of faults in a running training of 8 ranks: machine, cause, evictions, lost steps."""
