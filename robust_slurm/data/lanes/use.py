"""The use of each source: what the steps of a process have taken, and how long they waited."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from robust_slurm.data.sample import Meta


class Used(NamedTuple):
    """Sums of one source."""

    samples: int
    tokens: int
    waited: float  # s


class SourceUse:
    """Counts of each source. Only the thread that makes steps counts; any other may read.

    Figures that are read meanwhile may be one sample behind.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # samples, tokens, seconds
        self._asked = ""
        self._since = 0.0

    def waits(self, source: str) -> None:
        """Note that the source is asked for a sample. If it is asked again without an answer, that
        is still the same wait."""
        if self._asked != source:
            self.gives_up()
            self._since = time.monotonic()
            self._asked = source

    def got(self) -> None:
        """Note that the source that was asked has answered."""
        self._of(self._asked)[2] += time.monotonic() - self._since
        self._asked = ""

    def gives_up(self) -> None:
        """Note that no source is waited for any more. What was waited counts."""
        if self._asked:
            self.got()

    def drew(self, metas: Iterable[Meta]) -> None:
        """Count the samples of a step."""
        tokens: dict[str, list[int]] = {}
        for meta in metas:
            source = meta.ref.source
            if source in tokens:
                tokens[source].append(meta.tokens)
            else:
                tokens[source] = [meta.tokens]
        for source, each in tokens.items():
            sums = self._of(source)
            sums[0] += len(each)
            sums[1] += sum(each)

    def sums(self) -> dict[str, Used]:
        """Return the sums so far, those of a wait that has not ended among them."""
        source, waited = self.silent()
        found = {}
        for name, (samples, tokens, seconds) in list(self._sums.items()):
            more = waited if name == source else 0.0
            found[name] = Used(int(samples), int(tokens), seconds + more)
        if source and source not in found:
            found[source] = Used(0, 0, waited)
        return found

    def silent(self) -> tuple[str, float]:
        """Return the source that is waited for, and for how long; "" for none."""
        source, since = self._asked, self._since
        return source, time.monotonic() - since if source else 0.0

    def _of(self, source: str) -> list[float]:
        return self._sums.setdefault(source, [0, 0, 0.0])
