"""A data process as robust-task keeps it: it outlives ranks, and is started anew when it dies."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from robust_slurm import process_stat
from robust_slurm.data.service.wire import socket_name
from robust_slurm.text import how_ended, one_line
from srun_wrapper.agent.data.pings import EVERY, MOST, Pings
from srun_wrapper.agent.loop import Loop, Timer
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.starting import Starting

FAILED = 3  # exit code: the ranks know why (``data/service/main.py``)
DEATHS, WITHIN = 5, 600.0  # so many within so many seconds: it is not started any more
BACKOFF = 0.5  # s before a second start; doubled for each further one
_HIDDEN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "SLURM_PROCID", "SLURM_LOCALID"),
    *("ROBUST_BEAT_DIR", "ROBUST_CKPT_SOCKET", "ROBUST_LEARN", "ROBUST_TORCHRUN_BROKER"),
    *("ROBUST_LAUNCHER_IMPORTS", "ROBUST_SHIM", "ROBUST_EPOCH", "ROBUST_RESTART_REASON"),
)
"""Variables that are one rank's, or would make the process one. It has no GPU either."""
_MEMORY = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "4"}
"""Arrow's own pool and glibc keep memory for each thread, of which there is one a lane."""
_log = logging.getLogger("robust-task")
_starts: list[Starting[int]] = []
_ended_sessions: set[int] = set()
"""The pids of data processes that have ended, as long as a process of their session is left."""


def processes() -> list[int]:
    """Return the data processes that run below this one, and the readers of those that have ended
    (one may wait in the kernel for a file system that does not answer): they are no rank's."""
    return [start.pid for start in _starts if start.pid] + _readers_left()


class AskedData(msgspec.Struct, frozen=True):
    """A rank's request; ``data/service/client.py`` writes it."""

    name: str  # of the plan: module:attribute
    python: str
    main: str  # the program of the data process, as the rank sees it
    path: tuple[str, ...]  # its sys.path
    directory: str
    original: int  # number of ranks at the job's beginning
    code: str  # version of the code, and of the plan's own file
    memory: int
    environ: dict[str, str]

    def key(self) -> str:
        """Return the name of its socket, equal for all requests that one process can serve: the
        environment is left out, as it differs between ranks."""
        plan = (self.name, self.original, self.code, self.memory)
        return socket_name(*plan, self.python, self.main, self.path, self.directory)


class DataProcess:
    """One data process, and the socket on which it serves. Raises OSError. In the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        asked: AskedData,
        path: Path,
        exchange: tuple[socket.socket, str] | None = None,
    ) -> None:
        """``exchange``: a socket that listens for other nodes' data processes, and their key."""
        self._loop = loop
        self._asked = asked
        self._name = one_line(asked.name, 300)
        self._exchange = exchange
        self.path = path
        self.wanted = 0
        """Number of ranks that want it now."""
        self.off = ""
        """Why it is not started any more."""
        self.deaths = 0
        """Number of times that it has died."""
        self.figures = path.with_suffix(".json")
        """Path of the file with its figures (``data/service/figures.py``)."""
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._start: Starting[int] | None = None
        self._timer: Timer | None = None
        self._pings = Pings(loop, path, self._pid, self._dead)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(1024)

    @property
    def serves(self) -> bool:
        """Return whether it runs, and has answered: it is not at its start."""
        return self._start is not None and self._pings.answered

    def run(self) -> None:
        """Start the process, unless it runs, waits for its restart, or is off for good."""
        if self._start is not None and _is_half_dead(self._start.pid):
            self._start = None
        if self._start is not None or self._timer is not None or self.off:
            return
        asked, listener, exchange = self._asked, self._listener, self._exchange
        figures = str(self.figures)

        def make(start: Starting[int]) -> int:
            """Start it and wait for its end in this thread, its parent for the kernel."""
            try:
                return _ended(_begin(start, asked, listener, exchange, figures))
            finally:
                self._loop.call(lambda: _forget(start))

        def ended(code: int, status: int | None) -> None:
            over(how_ended(code if status is None else os.waitstatus_to_exitcode(status)))

        def failed(error: Exception) -> None:
            over(f"cannot be started: {error}")

        def over(how: str) -> None:
            if self._start is start:  # else another has taken its place
                self._over(how)

        self._start = start = Starting(self._loop, make, ended, failed)
        _starts.append(start)
        self._pings.begin()

    def _pid(self) -> int:
        return self._start.pid if self._start is not None else 0

    def _dead(self) -> None:
        """Kill a process that is stopped or deadlocked; another one is started in its place."""
        silent = f"has not answered for {EVERY * MOST:.0f} s and does nothing"
        _log.warning(f"the data process of {self._name} {silent}; killing it")
        self._kill()

    def _kill(self) -> None:
        if pid := self._pid():
            below = process_tree.descendants(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            process_tree.end_all(below)

    def _over(self, how: str) -> None:
        self._start = None
        self._pings.end()
        if how == how_ended(FAILED):
            return
        self.deaths += 1
        now = time.monotonic()
        first = not self._deaths or now - self._deaths[-1] > WITHIN
        self._deaths.append(now)
        recent = [at for at in self._deaths if now - at <= WITHIN]
        what = f"the data process of {self._name} {how or 'has ended'}"
        if len(recent) == DEATHS:
            self.off = f"it has ended {DEATHS} times within {WITHIN:.0f} s"
            self._listener.close()
            _log.warning(f"{what} again and is not started any more; ranks prepare their own data")
            return
        if first:
            _log.warning(f"{what}; restarting it")
        self._timer = self._loop.later(
            0.0 if len(recent) < 2 else BACKOFF * 2 ** (len(recent) - 2), self._again
        )

    def _again(self) -> None:
        self._timer = None
        if self.wanted:
            self.run()

    def stop(self) -> None:
        """End it for good."""
        self.off = self.off or "it is not wanted any more"
        self._pings.end()
        if self._timer is not None:
            self._timer.cancel()
        if self._start is not None:
            pid = self._start.pid
            below = process_tree.descendants(pid) if pid else []
            self._start.cancel()
            process_tree.end_all(below)
            self._start = None
        self._listener.close()
        for path in (self.path, self.figures, Path(f"{self.figures}.new")):
            with contextlib.suppress(OSError):
                path.unlink()


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in _HIDDEN}
    return _MEMORY | kept | {"CUDA_VISIBLE_DEVICES": ""}


def _begin(
    start: Starting[int],
    asked: AskedData,
    listener: socket.socket,
    exchange: tuple[socket.socket, str] | None,
    figures: str,
) -> int:
    """Start it and give it its orders; return its pid. Raises OSError, ValueError."""
    listen = listener.fileno()
    order = {"name": asked.name, "code": asked.code, "path": asked.path, "memory": asked.memory}
    order |= {"listen": listen, "figures": figures}
    passed = [listen]
    if exchange is not None:
        passed.append(exchange[0].fileno())
        order["exchange"] = passed[-1], exchange[1]
    theirs, ours = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(ours, "wb", 0) as file:
        with os.fdopen(theirs, "rb") as stdin:
            pid = start.popen(
                [asked.python, asked.main],
                _environ(asked.environ),
                pass_fds=passed,
                stdin=stdin,
                stdout=2,
                stderr=2,
                start_new_session=True,
                cwd=asked.directory,
            ).pid
        with contextlib.suppress(OSError):  # it has ended already
            file.write(json.dumps(order).encode())
    return pid


def _is_half_dead(pid: int) -> bool:
    """True if it has exited, but a thread of it waits in the kernel for a file system that does
    not answer: until then it is not reaped."""
    try:
        stat = process_stat.read(pid)
        return stat.state == "Z" and not stat.ended
    except (OSError, ValueError):
        return False  # its end is about to be told


def _forget(start: Starting[int]) -> None:
    _starts.remove(start)
    if start.pid:
        _ended_sessions.add(start.pid)
        _readers_left()  # a session that is empty is forgotten: its number may soon be a rank's


def _readers_left() -> list[int]:
    """Return the children of the sessions of data processes that have ended, and forget sessions
    without any. A session's first process is no reader: not reaped yet, or a rank of that number.
    """
    if not _ended_sessions:
        return []
    sessions = {pid: _session(pid) for pid in process_tree.children(os.getpid())}
    sessions = {pid: session for pid, session in sessions.items() if session != pid}
    _ended_sessions.intersection_update(sessions.values())
    return [pid for pid, session in sessions.items() if session in _ended_sessions]


def _session(pid: int) -> int:
    """Return a process's session; 0 if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _ended(pid: int) -> int:
    """Wait for the end of a child; return its exit code, if the loop has not reaped it yet."""
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if info is None:
        return 0
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
