"""Consoles and tables for a terminal. Imports rich, so it is imported only to print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any, Literal

from rich.console import Console
from rich.segment import Segment
from rich.table import Table

from robust_slurm.text import shown

from .plain_text import styled

# Without a terminal (a pipe, a log) nothing says how wide a line may be, and cutting loses facts.
PIPE_WIDTH = 200


class _Clean(Console):
    """Lets no control character of a text through: rich removes some, but no ESC."""

    def render(self, *args: Any, **words: Any) -> Iterable[Segment]:
        for segment in super().render(*args, **words):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(shown(text), style)


def console(file: IO[str]) -> Console:
    """Return a console that never reads markup, emoji codes, links or escapes out of data."""
    width = None if file.isatty() else PIPE_WIDTH
    file = styled(file)
    return _Clean(file=file, width=width, markup=False, emoji=False, highlight=False)


def plain_table(*headings: str, texts: int = 99) -> Table:
    """Return a table without lines. ``texts``: how many columns, the first ones, hold text."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        side: Literal["left", "right"] = "left" if number < texts else "right"
        made.add_column(heading, overflow="fold", justify=side)
    return made
