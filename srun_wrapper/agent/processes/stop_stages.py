"""The stages in which a rank is ended: abort of its communicators, SIGTERM, grace, SIGKILL."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from robust_slurm.auto.teardown import ABORT, DONE
from robust_slurm.frames.json_lines import peer
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.handler_work import HandlerWork

ABORTING = 1.0  # s for a rank to abort its communicators; one that holds the GIL never answers
STAGES = ("rejoin", "abort", "term", "late_abort", "kill")


def longest(all_of: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of each stage where it took longest."""
    found: dict[str, float] = {}
    for seconds in all_of:
        for stage, took in seconds.items():
            found[stage] = max(took, found.get(stage, 0.0))
    return {stage: found[stage] for stage in STAGES if stage in found}


class Aborts:
    """Requests to the ranks of one process tree to abort communicators (``auto.teardown``)."""

    def __init__(self, run_dir: Path, epoch: int, root: int) -> None:
        self._lines: list[tuple[int, socket.socket]] = []
        self._asked: list[socket.socket] = []
        ours: set[int] = set()
        for path in run_dir.glob(f"{epoch}-*.abort"):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            line.setblocking(False)
            try:
                line.connect(str(path))
                pid, _ = peer(line)
            except OSError:  # its rank is gone
                line.close()
                continue
            ours = ours or {root, *process_tree.descendants(root)}
            if pid in ours:
                self._lines.append((pid, line))
            else:
                line.close()

    def ask(self, wanted: Callable[[int], bool]) -> bool:
        """Ask the ranks whose pids are ``wanted``; return True if any rank has been asked."""
        for pid, line in list(self._lines):
            if wanted(pid):
                self._lines.remove((pid, line))
                with contextlib.suppress(OSError):
                    line.send(ABORT)
                    self._asked.append(line)
        return bool(self._asked)

    def open(self) -> bool:
        """True while a process that was asked has neither answered nor ended."""
        for line in list(self._asked):
            try:
                answer = line.recv(len(DONE))
            except BlockingIOError:
                continue
            except OSError:
                answer = b""
            if answer in (DONE, b""):
                line.close()
                self._asked.remove(line)
        return bool(self._asked)

    def close(self) -> None:
        for line in [*self._asked, *(line for _, line in self._lines)]:
            line.close()


class StopStages:
    """Ends the process tree of one rank; ``due`` is called until it returns True: SIGKILL is due.

    Communicators are aborted right before the process dies, never earlier: an aborted collective
    returns as if it had succeeded, and a handler of SIGTERM might save its result. So ranks
    without such a handler are asked before SIGTERM, which ends them, the others before SIGKILL.
    """

    def __init__(
        self,
        root: int,
        grace: float,
        work_limit: float,
        aborts: Aborts,
        send: Callable[[int], None],
        now: float,
    ) -> None:
        self._root = root
        self._grace = grace
        self._limit = work_limit
        self._aborts = aborts
        self._send = send
        self._work: HandlerWork | None = None
        self._termed = now
        self._until = now + ABORTING
        self._since = now
        self.stage = ""
        self.seconds: dict[str, float] = {}
        self.cut = ""
        """The file that the rank was still writing when it was killed."""
        if aborts.ask(lambda pid: grace > 0 and not process_tree.handles(pid, signal.SIGTERM)):
            self.stage = "abort"
        else:
            self._next("abort", now)

    def due(self, now: float) -> bool:
        """Leave the stages that are over; return True once only SIGKILL is left."""
        if self.stage == "abort" and (now >= self._until or not self._aborts.open()):
            self._next("abort", now)
        if self.stage == "term" and now >= self._until and not self._working(now):
            self._next("term", now)
        if self.stage == "late_abort" and (now >= self._until or not self._aborts.open()):
            self._next("late_abort", now)
        return self.stage == "kill"

    def hurry(self, grace: float, now: float) -> None:
        """Shorten the grace to that of a later order."""
        self._grace = min(self._grace, grace)
        if self.stage == "term":
            self._until = min(self._until, now + grace)
        self._limit = min(self._limit, grace)

    def ended(self, now: float) -> None:
        """Note that no process is left."""
        self._note(now)
        self._aborts.close()

    def _working(self, now: float) -> bool:
        if self._work is None or not self._work.at_work(now):
            return False
        if now < self._termed + self._grace + self._limit:
            return True
        self.cut = self._work.file or "a file"
        return False

    def _next(self, stage: str, now: float) -> None:
        """Begin the stage that follows ``stage``, which is over."""
        self._note(now)
        self._since = now
        if stage == "abort" and self._grace > 0:
            if self._limit > 0:
                self._work = HandlerWork(self._root)
            self._send(signal.SIGTERM)
            self._send(signal.SIGCONT)
            self.stage, self._termed, self._until = "term", now, now + self._grace
        elif stage != "late_abort" and self._aborts.ask(lambda _pid: True):
            self.stage, self._until = "late_abort", now + ABORTING
        else:
            self.stage = "kill"

    def _note(self, now: float) -> None:
        if self.stage:
            self.seconds[self.stage] = round(now - self._since, 4)
