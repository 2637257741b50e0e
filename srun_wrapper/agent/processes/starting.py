"""Starting processes without waiting for them.

``subprocess.Popen`` returns only when the child is through exec, which waits for a file system that
does not answer. So every start has a thread of its own.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree

T = TypeVar("T")


def never_vfork() -> None:
    """Start all processes by fork(): for robust-task alone, since in a large process it is slow.

    vfork() holds the interpreter's lock until the child is through exec: all threads would wait.
    """
    subprocess._USE_VFORK = False  # type: ignore[misc]


class Cancelled(OSError):
    """The start was cancelled before there was a process."""


class Starting(Generic[T]):
    """One process that is being started.

    ``make(start)`` runs in the thread, opens what it needs, calls ``start.popen`` and returns what
    ``done`` gets; ``failed`` gets what it raises. One of them is called in the loop,
    unless the start is cancelled first. The thread lives as long as the process, because the kernel
    sends PR_SET_PDEATHSIG when the *thread* that has forked ends.
    """

    def __init__(
        self,
        loop: Loop,
        make: Callable[[Starting[T]], T],
        done: Callable[[T, int | None], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """``done`` also gets the wait status if the process has been reaped already, else None."""
        self._loop = loop
        self._make = make
        self._done = done
        self._failed = failed
        self._process: _Process | None = None
        self._reaped: dict[int, int] = {}
        self._cancelled = False
        self.over = False
        """True once the process is through exec, or could not be started."""
        _pending.append(self)
        try:
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # no thread: a limit of the user, the job or the node
            error = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            loop.call(lambda: self._settle(lambda: failed(error)))

    @property
    def pid(self) -> int:
        """Pid of the process; 0 while there is none."""
        return getattr(self._process, "pid", 0)

    def popen(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        *,
        pass_fds: Collection[int] = (),
        **streams: Any,
    ) -> subprocess.Popen[bytes]:
        """Start the process; called by ``make`` only. Raises OSError (or Cancelled), ValueError."""

        def in_child() -> None:
            if self._cancelled:  # ``cancel`` was called before this child's pid was known
                os._exit(1)
            process_tree.die_with_parent(signal.SIGKILL)

        if self._cancelled:
            raise Cancelled
        self._process = process = _Process.__new__(_Process)
        process.__init__(  # type: ignore[misc]  # its pid is known while it waits in exec
            list(words), env=dict(env), pass_fds=tuple(pass_fds), preexec_fn=in_child, **streams
        )
        return process

    def cancel(self) -> None:
        """Kill the process, also one that is still to come; neither callback is called."""
        self._cancelled = True
        if self.pid and self.pid not in self._reaped and not self.over:
            process_tree.send([self.pid], signal.SIGKILL)

    # -- in the thread

    def _run(self) -> None:
        try:
            result = self._make(self)
        except Exception as error:  # noqa: BLE001 - nobody else would end this start
            failure = error
            self._loop.call(lambda: self._settle(lambda: self._failed(failure)))
            return
        self._loop.call(lambda: self._settle(lambda: self._started(result)))
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the loop has reaped it
            pass

    # -- in the loop

    def _settle(self, call: Callable[[], None]) -> None:
        self.over = True
        _pending.remove(self)
        if not self._cancelled:
            call()

    def _started(self, result: T) -> None:
        self._done(result, self._reaped.get(self.pid))


_pending: list[Starting[Any]] = []


def reaped(ended: Mapping[int, int]) -> None:
    """Note children of this process that have ended (pid → wait status), for pending starts."""
    for start in _pending:
        start._reaped |= ended


def unborn() -> list[int]:
    """Return the children of cancelled starts that are not through exec.

    They were killed, have never run the command, and end when the file system answers.
    """
    return [start.pid for start in _pending if start._cancelled and start.pid]


def why_not_started(program: str, error: Exception, directory: Path) -> str:
    """Return why ``program`` could not be started; its files were to be in ``directory``."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = Path(error.filename).parent if error.filename else directory.parent
        return f"no space left in {where}: cannot start {program!r}"
    no_ids = process_tree.no_ids() if getattr(error, "errno", None) == errno.EAGAIN else ""
    if no_ids:
        return f"{no_ids}: cannot start {program!r}"
    return f"cannot run {program!r}: {error}"


class _Process(subprocess.Popen[bytes]):
    """A process that the loop reaps, not this object."""

    def __del__(self, *_: object) -> None:
        """Do not reap, and do not warn."""
