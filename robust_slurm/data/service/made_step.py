"""One step, in memory that other processes map."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
        return [os.dup(self.pages[share].fd) for share in shares]

    def close(self) -> None:
        """Give its memory back, as far as no rank has it."""
        for page in self.pages.values():
            page.close()
