"""Ends all that runs below the shim of one slot, and finds what survives SIGKILL.

It also waits for what an earlier life of the shim left: a rank that started beside it might find
the memory of its GPU taken.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree, starting
from srun_wrapper.agent.processes.stop_stages import StopStages

KILL_DEADLINE = 10.0  # a process that survives SIGKILL this long is stuck in the kernel
CHECK = 0.01
UNBORN = 1.0  # s to wait for a process that was killed before its exec; later it is ignored
ANSWER = 1.0  # s for a file system to answer, when a process survives SIGKILL


class Emptying:
    """Ends a slot's processes. ``emptied`` gets the pids that survive SIGKILL, () if none does."""

    def __init__(
        self,
        loop: Loop,
        *,
        running: Callable[[], bool],
        kill: Callable[[], None],
        reap: Callable[[], None],
        staying: Callable[[], list[int]],
        look: Callable[[list[int], float, Callable[[tuple[str, ...]], None]], None],
        emptied: Callable[[tuple[int, ...]], None],
    ) -> None:
        """``running``: True while the rank's own process exists; ``kill``: send SIGKILL to all
        processes below the shim except ``staying``; ``reap``: collect ended children; ``look``:
        find the file systems that these pids use and that do not answer within so many seconds."""
        self._loop = loop
        self._running = running
        self._kill = kill
        self._reap = reap
        self._staying = staying
        self._look = look
        self._emptied = emptied
        self._kill_at = self._stuck_at = math.inf
        self._asking = False
        self.active = False
        self.stages: StopStages | None = None
        self._next_check = loop.later(0.0, self.check)

    def begin(self, stages: StopStages | None) -> None:
        """Begin to end all processes; ``stages`` end the rank itself."""
        self.active = True
        self.stages = stages or self.stages
        self._kill_at = self._stuck_at = math.inf
        self.check()

    def check(self) -> None:
        """Take the steps that are due now; also called whenever a child ends."""
        self._next_check.cancel()
        if not self.active:
            return
        self._next_check = self._loop.later(CHECK, self.check)  # set first: the rest may raise
        now = time.monotonic()
        if not self._running() or self.stages is None or self.stages.due(now):
            # The rank itself is gone, or has had its time: nothing it started may stay.
            if self._kill_at == math.inf:
                self._kill_at, self._stuck_at = now, now + KILL_DEADLINE
            self._kill()
            self._reap()
        spared = self._staying()
        if now >= self._kill_at + UNBORN:
            spared += starting.unborn()
        if process_tree.childless(spared + self._unreaped(now)):
            # An earlier life's processes have had SIGKILL. Whatever holds them, a driver that gives
            # back a GPU's memory or a file system, it is no evidence against this node.
            if now >= self._stuck_at:
                process_tree.forget_left_behind()
            if not process_tree.left_behind():
                self._over(())
        elif now >= self._stuck_at:
            self._stuck(process_tree.descendants(os.getpid(), spared))

    def _unreaped(self, now: float) -> list[int]:
        """Return the processes that have ended and cannot be reaped: a debugger has not let go."""
        if now < self._kill_at + UNBORN:
            return []  # mostly it is only a moment
        return process_tree.ended_of(process_tree.children(os.getpid()))

    def _stuck(self, pids: list[int]) -> None:
        """Report processes that survive SIGKILL; wait longer if their file system is silent.

        One that a debugger traces says nothing about the node.
        """
        pids = [pid for pid in pids if not process_tree.tracer_of(pid)]
        if not pids:
            self._over(())
            return
        if self._asking:
            return

        def answered(silent: tuple[str, ...]) -> None:
            self._asking = False
            if not self.active:
                return
            if silent:
                self._stuck_at = time.monotonic() + ANSWER
                self.check()
            elif not process_tree.childless([*self._staying(), *starting.unborn()]):
                self._over(tuple(pids)[:16])
            else:
                self.check()

        self._asking = True
        self._look(pids, ANSWER, answered)

    def _over(self, stuck: tuple[int, ...]) -> None:
        self.active = False
        self._emptied(stuck)
