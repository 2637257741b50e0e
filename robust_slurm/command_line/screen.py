"""Consoles and tables for a terminal. Imports rich, so it is imported only to print."""

from __future__ import annotations

from typing import IO, Literal

from rich.console import Console
from rich.table import Table

# Without a terminal (a pipe, a log) nothing says how wide a line may be, and cutting loses facts.
PIPE_WIDTH = 200


def console(file: IO[str]) -> Console:
    """Return a console that never reads markup, emoji codes or links out of data."""
    width = None if file.isatty() else PIPE_WIDTH
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False)


def plain_table(*headings: str, texts: int = 99) -> Table:
    """Return a table without lines. ``texts``: how many columns, the first ones, hold text."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        side: Literal["left", "right"] = "left" if number < texts else "right"
        made.add_column(heading, overflow="fold", justify=side)
    return made
