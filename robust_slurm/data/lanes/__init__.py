"""Lanes: the fixed, shuffled order in which a source is read."""
