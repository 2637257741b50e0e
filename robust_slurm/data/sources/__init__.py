"""Corpora: files of several formats as parts of records."""
