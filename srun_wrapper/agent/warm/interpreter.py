"""A slot's warm interpreter (``robust_slurm.auto.warm``): its start, its ranks and its end.

A rank is a fork of it: one that was made ahead (the stand-in), or else one made at the request.

It is used only for a command that is nothing but a Python interpreter with our hook in it: a rank
started by that command has recorded so at its first step. A shell script, another interpreter or a
container without the hook never records it, and is started as a fresh process each time.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from robust_slurm.auto.shown import PAD, PADDING
from robust_slurm.auto.warm import VARIABLE
from srun_wrapper.agent.loop import Loop, Timer
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.starting import Starting
from srun_wrapper.agent.warm.commands import request_of, same_path, same_start
from srun_wrapper.agent.warm.imports import ImportWatch, Learnt
from srun_wrapper.agent.warm.link import ANSWER, Said, WarmLink
from srun_wrapper.agent.warm.preforked import Ahead, Ordered

_numbers = itertools.count(1)
STAND_IN = 2.0  # s from a rank's start, or its own, to the stand-in: other ranks are starting, too
MADE = 30.0  # s that this may take


class Warm:
    """At most one warm interpreter. All methods are called in the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        run_dir: Path,
        named: Sequence[str],
        learnt: Callable[[Learnt], None],
        changed: Callable[[], None],
    ) -> None:
        """``named``: packages of the training's own that may be imported ahead, too.
        ``learnt`` is called with what a rank has told, ``changed`` when ``ready`` has changed."""
        self._tell = learnt
        self._changed = changed
        self._loop = loop
        self._named = tuple(named)
        self._pid = 0
        self._starting: Starting[int] | None = None
        """The process that is not through exec yet."""
        self._link: WarmLink | None = None
        self._command: list[str] = []
        self._arguments = 0
        self._environ: dict[str, str] = {}
        self.ready = False
        """True once it has imported everything and waits."""
        self._further = False
        self.early = False
        """True if it was started ahead of the first rank, and has not been asked for one."""
        self._ahead: Ahead | None = None
        self._off = ""
        self._asked: Callable[[int], None] | None = None
        self._ordered = Ordered()
        self._timer: Timer | None = None
        self._watch = ImportWatch(loop)
        self._lock = run_dir / "warm.lock"
        self._list = run_dir / f"warm-{os.getpid()}-{next(_numbers)}.json"

    # -- getting one

    def watch(
        self,
        paths: Sequence[Path],
        pid: int,
        command: Sequence[str],
        env: Mapping[str, str],
        directory: str = "",
    ) -> None:
        """Once rank ``pid`` has told in one of ``paths`` what it imports, get one ready."""
        if self._off or self._runs:
            return

        def found(learnt: Learnt) -> None:
            self._tell(learnt)
            self.start(learnt, command, env, directory)

        self._watch.begin(paths, pid, command, env, found)

    def unwatch(self) -> None:
        """The rank has ended."""
        self._watch.end()

    def start(
        self,
        learnt: Learnt,
        command: Sequence[str],
        env: Mapping[str, str],
        directory: str = "",
        *,
        further: bool = False,
    ) -> None:
        """Start one for this command unless it runs; end one for another. ``further``: no rank has
        run: run the script to its standby_point, if any."""
        if self._runs and not self._is_for(command, env):
            self.stop()
        if self._off or self._runs:
            return
        self._watch.end()
        self._command, self._environ, self._directory = list(command), dict(env), directory
        self.early, self._further = further, further and learnt.standby
        try:
            self._lock.touch(0o600)
            self._list.write_bytes(msgspec.json.encode(learnt))
        except OSError as err:
            self._off = str(err)
            return
        ours, theirs = socket.socketpair()
        self.ready = False
        self._link = WarmLink(self._loop, ours, self._heard, self.stop)
        order = {"learnt": str(self._list), "named": self._named, "lock": str(self._lock)}
        words, own, place = self._command, self._environ, directory or None

        def make(start: Starting[int]) -> int:
            with theirs:
                fd = theirs.fileno()
                its = own | {VARIABLE: str(fd), PAD: PADDING}
                return start.popen(words, its, pass_fds=[fd], start_new_session=True, cwd=place).pid

        self._starting = Starting(self._loop, make, self._started, self._failed)
        try:
            self._link.send(order)
        except OSError:
            self.stop()

    @property
    def _runs(self) -> bool:  # or is starting
        return bool(self._pid or self._starting)

    def _started(self, pid: int, status: int | None) -> None:
        self._starting, self._pid = None, 0 if status is not None else pid
        if status is not None:
            self.stop()  # it has ended at once

    def _failed(self, error: Exception) -> None:
        self._starting = None
        self._off = str(error)
        self.stop()

    # -- asking it

    def fits(self, command: Sequence[str], env: Mapping[str, str], directory: str = "") -> bool:
        """True if the interpreter is ready to become this command in this environment: the same
        interpreter, options and script. ``directory``: default this process's."""
        usable = self.ready and self._asked is None and self._is_for(command, env)
        return usable and same_path(env, self._directory, directory)

    def _is_for(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """True if it was started with this command line, but for the script's own arguments (known
        once it is ready), and with the same variables of ``at_start``."""
        own, arguments = (self._command, self._environ), self._arguments if self.ready else 0
        return same_start(own, (command, env), arguments)

    def ask(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        streams: Sequence[int],
        answer: Callable[[int], None],
        directory: str = "",
        wait: float = 0.0,
    ) -> bool:
        """Request a rank; False if that fails. ``answer(pid)`` is called once, with 0 if there will
        be no rank. ``streams``: its stdout and stderr; ``directory``: default this process's;
        ``wait``: s until its script may go on.
        """
        self._further = False
        if self._ahead is not None and not self._ahead.fits(command, self._command):
            self._end_ahead()
        request = request_of(command, env, directory) | {"begin": time.monotonic() + wait}
        if not self._send(request, streams):
            self.stop()
            return False
        self._asked = answer
        self.early = False
        self._loop.later(ANSWER, lambda: self.stop() if self._asked is answer else None)
        return True

    def _send(self, request: object, fds: Sequence[int]) -> bool:
        """Send to the process that was forked ahead; if that has gone, to the interpreter."""
        if self._ahead is not None:
            try:
                self._ahead.link.send(request, fds)
            except OSError:
                self._end_ahead()
            else:
                self._ahead.asked = True
                return True
        try:
            assert self._link is not None
            self._link.send(request, fds)
        except OSError:
            return False
        return True

    def _answer(self, pid: int) -> bool:
        """Answer the open request for a rank; False if there is none."""
        answer, self._asked = self._asked, None
        if answer is not None:
            answer(pid)
        return answer is not None

    def _heard(self, said: Said) -> None:
        if said.over:
            self._off = "" if self.ready else said.over  # a change of sources: learn again
            self.stop()
        elif said.stand_in:
            self._made(said)
        elif said.pid:
            if not self._answer(said.pid):
                process_tree.send([said.pid], signal.SIGKILL)  # nobody waits for it any more
            self._make_later(STAND_IN)
        elif said.ready:
            self.ready, self._arguments = True, said.arguments
            self._changed()
            self._make_later(0.0 if self._further else STAND_IN)

    # -- ahead of a rank

    def _make_later(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.later(seconds, self._make)

    def _make(self) -> None:
        """Have a stand-in forked, unless there is one or a rank is just being started."""
        if self._link is None or not self.ready or self._ahead is not None or self._ordered:
            return
        if self._asked is not None:
            self._make_later(STAND_IN)
            return
        number = next(_numbers)
        theirs = self._ordered.begin(number)
        try:
            self._link.send({"stand_in": number}, [theirs.fileno()])
        except OSError:
            self.stop()
        finally:
            theirs.close()
        self._loop.later(MADE, lambda: self._ordered.cancel(number))

    def _made(self, said: Said) -> None:
        ours = self._ordered.done(said.stand_in, said.pid)
        if ours is None:
            return
        gone, over = self._ahead_gone, self._ahead_over
        self._ahead = Ahead(self._loop, ours, said.pid, self._activated, gone, over)
        if self._further:  # a node without ranks
            self._further = False
            self._ahead.run(request_of(self._command, self._environ, self._directory))

    def _activated(self, pid: int) -> None:
        """Note that the process forked ahead is now a rank."""
        if self._ahead is not None:
            self._ahead.link.close()
            self._ahead = None
        self._heard(Said(pid=pid))

    def _ahead_over(self) -> None:
        """Give up the process ahead, which cannot be a rank. If it has not run any of the script,
        no fork of the interpreter can: give that up too."""
        if self._ahead is not None and self._ahead.further:
            self._ahead_gone()
        else:
            self.stop()

    def _ahead_gone(self) -> None:
        """Note that the process ahead has gone; if it was to be the rank, there is none."""
        asked = self._ahead is not None and self._ahead.asked
        self._end_ahead()
        if asked:
            self._answer(0)

    def _end_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.end()

    def cold(self) -> None:
        """Give way to a rank that starts as a fresh process: nothing may run the script beside it,
        and imports ahead of it come too late."""
        self._further = False
        if self._ahead is not None and self._ahead.further:
            self._end_ahead()
        self.late()
        self.cancel()

    def late(self) -> None:
        """Stop if it still imports ahead of a first rank: that rank has started without it."""
        if self.early and not self.ready:
            self.stop()

    # -- its end

    def processes(self) -> list[int]:
        """Pids that must not be ended with a rank."""
        ahead = self._ahead.pid if self._ahead is not None else 0
        starting = self._starting.pid if self._starting is not None else 0
        return [pid for pid in (self._pid, starting, ahead) if pid]

    def reaped(self, pids: Collection[int]) -> None:
        self._ordered.reaped(pids)
        if self._ahead is not None and self._ahead.pid in pids:
            self._ahead.pid = 0
            if not self._ahead.asked:  # else its last words may still be on their way
                self._ahead_gone()
        if self._pid in pids:
            self._pid = 0
            self.stop()

    def cancel(self) -> None:
        """Cancel a rank that is being forked; only the interpreter's own end makes that sure."""
        self._ordered.cancel()
        if self._asked is not None:
            self.stop()

    def stop(self) -> None:
        """End it; an open request for a rank is answered with 0."""
        pid, self._pid, self.ready = self._pid, 0, False
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._timer is not None:
            self._timer.cancel()
        self._ordered.cancel()
        self._end_ahead()
        if pid:
            process_tree.send([pid], signal.SIGKILL)
        self._answer(0)
        self._changed()
