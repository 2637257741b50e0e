"""Figures of a data process: a small file for robust-task, replaced every 2 s.

A JSON array, as ``srun_wrapper/protocol/data_messages.py`` reads it::

    [steps ahead, the most of them, bytes held, the most of them, whether all lanes are read here,
     [[source, tokens/s, samples/s, s of the last minute that steps waited for it,
       s since when it is waited for now, records read, bad ones of them], …],
     number of sources that are the last row together]
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from robust_slurm.data.lanes.use import SourceUse, Used
    from robust_slurm.data.service.ring import Level

EVERY = 2.0  # s
WINDOW = 60.0  # s that rates and waits are of
MOST = 20  # sources with a row of their own: those that were waited for longest, or skipped most
NAME = 100  # characters of a source's name


class FiguresFile:
    """``levels``: of the steps held; ``use``: of the sources; ``reads``: whether all lanes are
    read here, and how many records of each source, and bad ones."""

    def __init__(
        self,
        path: str,
        levels: Callable[[], Level],
        use: SourceUse,
        reads: Callable[[], tuple[bool, dict[str, tuple[int, int]]]],
    ) -> None:
        self._path = path
        self._levels, self._use, self._reads = levels, use, reads
        self._past: deque[tuple[float, Mapping[str, Used]]] = deque()
        self._written: Any = None

    def begin(self) -> None:
        """Write in a thread, until the process ends or the file's directory has gone."""
        with contextlib.suppress(RuntimeError):  # no thread is left: the data goes first
            threading.Thread(target=self._run, name="data-figures", daemon=True).start()

    def now(self, at: float) -> list[Any]:
        """Return the content of the file at a time, in monotonic seconds."""
        sums = self._use.sums()
        while len(self._past) > 1 and self._past[1][0] <= at - WINDOW:
            self._past.popleft()
        since, before = self._past[0] if self._past else (at, sums)
        self._past.append((at, sums))
        seconds = max(at - since, EVERY)
        all_here, read = self._reads()
        silent, silent_for = self._use.silent()
        rows: list[list[Any]] = []
        for name in {**sums, **read}:
            samples, tokens, waited = sums.get(name, (0, 0, 0.0))
            old = before.get(name, (0, 0, 0.0))
            rates = (tokens - old[1]) / seconds, (samples - old[0]) / seconds
            times = waited - old[2], silent_for if name == silent else 0.0
            numbers = [_short(max(0.0, each)) for each in (*rates, *times)]
            rows.append([name[:NAME], *numbers, *read.get(name, (0, 0))])
        rows.sort(key=lambda row: (-row[4], -row[3], -row[6], -row[1]))
        rest = rows[MOST:]
        if rest:
            sums_of = [_short(sum(column)) for column in list(zip(*rest))[1:]]  # noqa: B905 - 3.9
            rows[MOST:] = [["", *sums_of]]
        return [*self._levels(), all_here, rows, len(rest)]

    def _run(self) -> None:
        while True:
            try:
                self._write(self.now(time.monotonic()))
            except FileNotFoundError:  # robust-task has gone
                return
            except OSError:  # there is no room: the next ones will do
                pass
            time.sleep(EVERY)

    def _write(self, content: list[Any]) -> None:
        if content == self._written:
            os.utime(self._path)  # it lives
            return
        draft = f"{self._path}.new"
        with open(draft, "w") as file:
            json.dump(content, file, separators=(",", ":"))
        os.replace(draft, self._path)  # noqa: PTH105
        self._written = content


def _short(value: float) -> float:
    """Round a number to four digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
