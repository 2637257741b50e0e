"""A source: parts in a fixed order, each a sequence of records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class SourcePart(NamedTuple):
    """A piece of a source that is read in one go: a file, or a row group of one."""

    name: str  # the path or URL, with "#n" for a row group
    size: int  # bytes; a file that has changed is an error, not other data
    records: int = -1  # -1: not known before it is read


class BadRecord(NamedTuple):
    """A record that could not be read or decoded."""

    part: str
    record: int
    why: str
    rest: bool = False  # nor can all that follow it in the part


class SourceOptions(NamedTuple):
    """The options that sources of all formats share."""

    lanes: int = 4  # at most: a source has no more lanes than parts (``order.lanes_of``)
    window: int = 256  # records that are shuffled together; 1: the file's order
    bad: str = "error"  # or "skip": bad records are counted and left out
    most_bad: float = 0.01  # the share of bad records at which "skip" ends in an error
    patience: float = 300.0  # seconds without a record until SourceStalled
    stalled: str = "error"  # on SourceStalled: "error", "wait" or "hold back"


class Source(Protocol):
    """A corpus in parts. Given to ``Plan(sources={name: source})``; read by lanes."""

    @property
    def options(self) -> SourceOptions:
        """Return how this source is read; SourceOptions() without special wishes."""

    def parts(self) -> list[SourcePart]:
        """Return all parts, in an order that depends on their names alone. Raises DataError."""

    def read(
        self, part: int, start: int = 0
    ) -> Iterator[tuple[int, dict[str, Any] | BadRecord | None]]:
        """Yield (index, decoded record) from record ``start`` of the part on. None is a record
        that is left out. Threads read at the same time. Raises DataError; OSError: the lane tries
        again until ``patience`` is over."""

    def fingerprint(self) -> str:
        """Return a digest that tells the parts' content from that of others, by names, sizes and
        samples. It is kept in the plan's state: a state of other files is an error, not other data.
        The folder of all files may be another, and so may the files' times."""
