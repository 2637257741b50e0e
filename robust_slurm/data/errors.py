"""Errors of data, told from those of nodes."""

from __future__ import annotations


class DataError(Exception):
    """A plan, a source or a state that cannot be used: says what, where, and what to do."""


class SourceStalled(DataError):
    """A source has given nothing for longer than its ``patience``."""


class EndOfData(DataError):
    """The plan's epochs are over: there is no further step."""
