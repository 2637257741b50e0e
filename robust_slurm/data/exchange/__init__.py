"""Lanes that are read on one node and used by all."""
