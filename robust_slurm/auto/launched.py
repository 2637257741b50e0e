"""torchrun's ranks: in its process, has robust-task fork them from warm interpreters.

torchrun starts each rank as a fresh interpreter. Here its call that does so first asks
robust-task, through the socket named by ROBUST_TORCHRUN_BROKER, and only starts one itself when
none is warm. The rank is then a child of robust-task, which tells how it ended.

Runs in the user's torchrun: standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    import subprocess
    from collections.abc import Sequence
    from typing import Any

BROKER = "ROBUST_TORCHRUN_BROKER"
IMPORTS = "ROBUST_LAUNCHER_IMPORTS"
"""File in which torchrun tells what it has imported itself."""
ANSWER = 5.0  # s; robust-task gives up sooner


def hook(module: Any) -> None:
    """``module``: torch's that starts the ranks, just loaded."""
    handler = module.SubprocessHandler
    original = handler._popen

    def popen(self: Any, args: Sequence[str], env: dict[str, str]) -> Any:
        _tell_imports()
        process = ask(args, env, [getattr(self, "_stdout", None), getattr(self, "_stderr", None)])
        return original(self, args, env) if process is None else process

    handler._popen = popen


def _tell_imports() -> None:
    """Record torchrun's own imports, before its first rank: its next start may find them imported
    ahead."""
    from robust_slurm.auto import learnt

    try:
        learnt.tell(os.environ[IMPORTS])
    except (KeyError, OSError):
        pass


def ask(words: Sequence[str], environ: dict[str, str], files: Sequence[Any]) -> Launched | None:
    """Have robust-task fork a rank of this command line and environment; None: start it here."""
    import json
    import socket
    import threading

    path = os.environ.get(BROKER)
    if not path:
        return None
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.settimeout(ANSWER)
    try:
        link.connect(path)
        fds = [n if file is None else file.fileno() for n, file in zip((1, 2), files)]  # noqa: B905
        request = {
            "words": list(words),
            "environ": environ,
            "directory": os.getcwd(),  # noqa: PTH109
            "thread": threading.get_native_id(),  # which may have processors of its own
        }
        body = json.dumps(request).encode()
        socket.send_fds(link, [len(body).to_bytes(8, "big")], fds)
        link.sendall(body)
        launched = Launched(link)
        if launched.pid:
            return launched
    except (OSError, ValueError) as error:
        sys.stderr.write(f"robust-slurm: no warm start: {error}\n")
    link.close()
    return None


class Launched:
    """The part of ``subprocess.Popen`` that torchrun uses, for a child of robust-task."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._rest = b""
        self.returncode: int | None = None
        self.pid = self._number() or 0

    def _number(self) -> int | None:
        """The next line; None at the end of the connection. Raises TimeoutError and the like."""
        while b"\n" not in self._rest:
            more = self._link.recv(64)
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return int(line)

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except _expired():
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._link.settimeout(timeout)
            try:
                status = self._number()
            except (BlockingIOError, TimeoutError):
                raise _expired()(["rank"], timeout or 0.0) from None
            # robust-task has gone: the kernel has killed the rank with it.
            self.returncode = -9 if status is None else os.waitstatus_to_exitcode(status)
            self._link.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)


def _expired() -> type[subprocess.TimeoutExpired]:
    import subprocess

    return subprocess.TimeoutExpired
