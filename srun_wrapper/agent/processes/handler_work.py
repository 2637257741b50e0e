"""Signs that a process tree is at work in its handler of SIGTERM: it writes a file."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from srun_wrapper.agent.processes import process_tree

EVERY = 0.2  # s between looks
IDLE = 2.0  # s without a sign after which it is no longer at work
MUCH = 64 << 10  # bytes read and written between two looks: more than logging causes


def written_files(pids: list[int]) -> set[str]:
    """Regular files that these processes have open for writing, memory and devices excepted."""
    found = set()
    for pid in pids:
        try:
            fds = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        for fd in fds:
            try:
                target = str(fd.readlink())
                if target[0] != "/" or target.startswith("/dev/") or target.endswith("(deleted)"):
                    continue
                info = Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text()
            except OSError:
                continue
            flags = next((line for line in info.splitlines() if line.startswith("flags:")), "")
            if int(flags.partition(":")[2] or "0", 8) & os.O_ACCMODE != os.O_RDONLY:
                found.add(target)
    return found


class HandlerWork:
    """Looks at a tree from the moment of its SIGTERM on. Times are monotonic seconds.

    Use of the CPU alone is no sign: a rank in a hung collective of NCCL spins.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        # Without a handler in the root nothing of the tree outlives the signal.
        pids = self._pids() if process_tree.handles(root, signal.SIGTERM) else []
        self._before = written_files(pids)
        self._last = process_tree.usage(pids) if pids else None
        self._looked = 0.0
        self._sign = 0.0
        self.file = ""
        """The file that the tree was last seen to write."""

    def _pids(self) -> list[int]:
        return [self._root, *process_tree.descendants(self._root)]

    def at_work(self, now: float) -> bool:
        """True if the tree has shown a sign of work within ``IDLE``."""
        if self._last is None:
            return False
        if now - self._looked >= EVERY:
            self._looked = now
            self._look(now)
        return now - self._sign < IDLE

    def _look(self, now: float) -> None:
        pids = self._pids()
        usage = process_tree.usage(pids)
        assert self._last is not None
        moved = usage.io > self._last.io or usage.cpu > self._last.cpu or usage.state == "D"
        much = usage.io - self._last.io >= MUCH
        self._last = usage
        fresh = sorted(written_files(pids) - self._before) if moved else []
        if fresh or much:
            self._sign = now
            self.file = fresh[0] if fresh else self.file
