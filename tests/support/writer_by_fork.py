"""An interpreter for forks of ``torch_forks``: the writer of durable steps is forked, too.

A writer imports torch, for some seconds of a core, and each rank of a training has one. What stands
for ``sys.executable`` in a fork passes its files on to the process that forks, and ends as the
writer ends; killed, it takes the writer with it. All else it executes as Python would.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

_LIMIT = 1 << 17  # bytes of an environment
_MODULE = "robust_slurm.checkpoint.durable.writer"
_PROGRAM = f"from {_MODULE} import main; main()"
_STAND_IN = """#!{python} -IS
import json, os, socket, sys
if sys.argv[-1:] != ["{module}"]:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect("{address}")
socket.send_fds(line, [json.dumps(dict(os.environ)).encode()], [0, 1, 2])
os._exit(int(line.recv(16) or 1))
"""


def stand_in(directory: str) -> str:
    """Write what stands for ``sys.executable``; return its path."""
    path = Path(directory) / "python"
    text = _STAND_IN.format(python=sys.executable, module=_MODULE, address=address(directory))
    path.write_text(text)
    path.chmod(0o700)
    return str(path)


def address(directory: str) -> str:
    return f"{directory}/writers"


def listen(directory: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(address(directory))
    sock.listen(64)
    return sock


def forked(listener: socket.socket) -> str | None:
    """Fork the writer that is asked for. Returns in the writer only, with its program."""
    line, _ = listener.accept()
    raw, files, _, _ = socket.recv_fds(line, _LIMIT, 3)
    if not os.fork():
        listener.close()
        writer = os.fork()
        if writer:
            for file in (0, 1, 2, *files):
                os.close(file)
            _watch(line, writer)
        os.setsid()
        line.close()
        take(files)
        os.environ.clear()
        os.environ.update(json.loads(raw))
        sys.argv = ["-c"]
        return _PROGRAM
    line.close()
    for file in files:
        os.close(file)
    return None


def take(files: list[int]) -> None:
    """Make these files the standard ones."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)


def _watch(line: socket.socket, writer: int) -> None:
    """Tell how the writer has ended; end it if nobody is there to be told."""
    pidfd = os.pidfd_open(writer)
    ready, _, _ = select.select([line, pidfd], [], [])
    if pidfd not in ready:
        os.kill(writer, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    try:
        line.sendall(str(code & 0xFF).encode())
    finally:
        os._exit(0)
