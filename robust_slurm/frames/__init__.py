"""Authenticated frames between our own processes: the bytes, and the end that accepts."""
