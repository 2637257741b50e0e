"""The layout of a snapshot in its file, with the part of the header that stays the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..format.layout import Entry, FileLayout, Snapshot, encode_header, lay_out


class Form:
    """Layout of one set of entries in a file, and the part of the header that never changes."""

    def __init__(
        self,
        entries: Sequence[Entry],
        late: Sequence[int],
        about: Snapshot,
        frozen: Collection[str] = frozenset(),
    ) -> None:
        """``late``: the entries (by index) that are copied in the background; ``frozen``: see
        ``lay_out``."""
        self.entries = list(entries)
        self.late = tuple(late)
        chosen = set(late)
        self.early = tuple(i for i in range(len(self.entries)) if i not in chosen)
        self._about, self._frozen = about, frozen
        self._room = 0
        self.plan: FileLayout
        self.reserve(0)

    def reserve(self, header_bytes: int) -> None:
        """Lay out anew for a header of this many bytes and a quarter more."""
        plan = lay_out(self.entries, 0, self._frozen)
        mark, step, same = "@values@", 7_777_777_777_777_777, 6_666_666_666_666_666
        raw = encode_header(
            self._about._replace(step=step, values=mark, entries=plan.entries, same=same)
        ).decode()
        # The header is JSON inside JSON: each mark stands in it exactly once, before any name.
        self._first, rest = raw.split(str(same), 1)
        self._head, rest = rest.split(str(step), 1)
        self._middle, self._tail = rest.split(f'\\"{mark}\\"', 1)
        room = max(len(raw), header_bytes) * 5 // 4
        self.plan = lay_out(self.entries, room, self._frozen)
        first = {id(e): at for e, at in zip(self.plan.entries, self.plan.offsets, strict=True)}
        self.offsets = tuple(first[id(e)] for e in self.entries)

    def header(self, step: int, values: str, same: int = -1) -> bytes:
        """The header for these values, which are JSON inside a JSON string."""
        return f"{self._first}{same}{self._head}{step}{self._middle}{values}{self._tail}".encode()
