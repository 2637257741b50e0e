"""One step, in memory that other processes map."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from robust_slurm.data.service.pages import SealedPage


class MadeStep(NamedTuple):
    """One step: its name is the digest of the state before it."""

    before: str
    number: int
    pages: Mapping[int, SealedPage]  # by share
    state: str  # after it, as JSON
    after: str

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(page.size for page in self.pages.values())

    def descriptors(self, shares: Iterable[int]) -> list[int]:
        """Return descriptors of these shares' memory, which the caller closes. Raises OSError."""
        fds: list[int] = []
        try:
            for share in shares:
                fds.append(os.dup(self.pages[share].fd))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def close(self) -> None:
        """Give its memory back, as far as no rank has it."""
        for page in self.pages.values():
            page.close()


def shared(steps: Iterable[MadeStep], shares: Collection[int]) -> list[tuple[MadeStep, list[int]]]:
    """Return steps with descriptors of these shares' memory, which the caller closes: fewer steps
    if too many files are open."""
    found: list[tuple[MadeStep, list[int]]] = []
    try:
        for made in steps:
            found.append((made, made.descriptors(shares)))
    except OSError:
        pass
    return found
