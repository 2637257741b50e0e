"""What a source is: parts in a fixed order, each a sequence of records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Part(NamedTuple):
    """What is read in one go: a file, or a row group of one."""

    name: str  # the path or URL, with "#n" for a row group
    size: int  # bytes; a file that has changed is an error, not other data
    records: int = -1  # -1: not known before it is read


class Bad(NamedTuple):
    """A record that could not be read or decoded."""

    part: str
    record: int
    why: str


class Source(Protocol):
    """A corpus in parts. Given to ``Plan(sources={name: source})``; read by lanes."""

    def parts(self) -> list[Part]:
        """Return all parts, in an order that depends on their names alone. Raises DataError."""

    def read(self, part: int, start: int = 0) -> Iterator[tuple[int, dict[str, Any] | Bad]]:
        """Yield (index, decoded record) from record ``start`` of the part on. Records that the
        user's ``decode`` returns None for are left out. Raises DataError, OSError."""
