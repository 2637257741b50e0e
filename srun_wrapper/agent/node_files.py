"""The node agent's watch on the shared file systems that its ranks use.

Nothing is asked while all goes well. A mount is asked when a start or a stop takes longer than
usual, when no rank of the node makes a step, and when the ranks are inspected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from srun_wrapper.agent import filesystems, needed_files
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.file_messages import FindFiles, FoundFiles
from srun_wrapper.protocol.messages import RankBeat

SLOW = 1.0  # s that a start or a stop may take until its file systems are asked
QUIET = 4.0  # s without a step of any rank of the node, likewise
ANSWER = 2.0  # s for a file system to answer
INSPECTION = 0.8  # s, while the ranks are inspected
AGAIN = 4.0  # s until all are asked again
AGAIN_STALLED = 0.5  # s, while one does not answer


def directory() -> str:
    """Return this process's working directory; "" if it was removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


class NodeFiles:
    """``stalled(mounts, starting)`` is called at each change, ``looked()`` after each look.

    ``roots``: pids of the node's shims; ``paths``: what starting a rank touches.
    """

    def __init__(
        self,
        loop: Loop,
        roots: Callable[[], Sequence[int]],
        paths: Callable[[], set[str]],
        stalled: Callable[[tuple[str, ...], bool], None],
        looked: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._roots = roots
        self._paths = paths
        self._on_stalled = stalled
        self._on_looked = looked
        self.looking = False
        self._looked_at = 0.0  # when the last look was begun
        self._silent: tuple[str, ...] = ()
        self._epoch = 0
        self._starting: set[int] = set()  # slots
        self._busy_since: float | None = None  # start or stop
        self._moved = time.monotonic()
        self._beats: dict[int, int] = {}
        self._next = 0.0
        self._told: tuple[tuple[str, ...], bool] = ((), False)

    # -- what the node does

    def starts(self, epoch: int, slots: Collection[int]) -> None:
        """Ranks are to be started in these slots."""
        self._epoch, self._starting = epoch, set(slots)
        self._busy_since = self._moved = time.monotonic()
        self._beats.clear()

    def started(self, epoch: int, slot: int) -> None:
        """A rank is through exec, or cannot be started."""
        if epoch == self._epoch and slot in self._starting:
            self._starting.discard(slot)
            if not self._starting:
                self._busy_since, self._moved = None, time.monotonic()

    def starting(self, slot: int) -> bool:
        """Return whether a rank is to be started in this slot and has not been yet."""
        return slot in self._starting

    def stops(self) -> None:
        """The ranks are to end."""
        self._starting.clear()
        self._busy_since = time.monotonic()

    def stopped(self) -> None:
        """All of them have ended."""
        self._busy_since = time.monotonic() if self._starting else None

    def tick(self, beats: Collection[RankBeat]) -> None:
        """Called at every look at the records; asks the file systems when it is time."""
        now = time.monotonic()
        counts = {beat.local: beat.beats for beat in beats}
        if counts != self._beats:
            self._beats, self._moved = counts, now
        slow = self._busy_since is not None and now - self._busy_since > SLOW
        waits = slow or bool(self._silent) or (self._epoch > 0 and now - self._moved > QUIET)
        if waits and now >= self._next:
            self.ask_all(ANSWER)

    # -- asking

    def ask_all(self, seconds: float = INSPECTION) -> None:
        """Ask all shared file systems in use."""
        if self.looking:
            return
        roots, paths = self._roots(), self._paths()
        self.looking, self._looked_at = True, time.monotonic()
        self._loop.run_in_thread(
            lambda: filesystems.silent_mounts(roots, paths, seconds), self._looked, filesystems.NONE
        )

    def find(self, order: FindFiles, answer: Callable[[FoundFiles], None]) -> None:
        """Look for files; a file system that hangs costs the answer, and nothing else."""
        here, env = directory(), dict(os.environ)
        self._loop.run_in_thread(
            lambda: needed_files.find(order, here, env), answer, FoundFiles(order.token)
        )

    def answering(self) -> tuple[str, ...]:
        """Return the file systems that have answered in the last look."""
        return filesystems.answering(self._looked_at)

    def _looked(self, silent: tuple[str, ...]) -> None:
        self.looking = False
        self._silent = silent
        self._next = time.monotonic() + (AGAIN_STALLED if silent else AGAIN)
        told = (silent, bool(silent and self._starting))
        if told != self._told:
            self._told = told
            self._on_stalled(*told)
        self._on_looked()
