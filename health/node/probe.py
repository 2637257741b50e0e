"""Two operations that can hang, each in a process of its own: a directory's probe, a command."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Sequence

from health.children.child import Child, fork, where_it_hangs, write_all
from health.node.stuck import Stuck
from health.node.system import CommandOutput

_OUTPUT_LIMIT = 1 << 20  # bytes kept of each stream of a command
_LISTED = 16  # entries that prove that a listing works
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


def probe(path: str, write: bool, deadline_s: float, stuck: Stuck | None = None) -> None:
    """Prove that a directory answers; OSError as the file system gave it, or TimeoutError.

    Where an earlier probe still hangs there is no other: TimeoutError at once.
    """
    key = f"probe {path}"
    still = stuck.still(key) if stuck else ""
    if still:
        raise TimeoutError(errno.ETIMEDOUT, still, path)
    child = fork(lambda fd: _probe(fd, path, write), deadline_s)
    try:
        answer = _answer(child, deadline_s)
        if answer is None:
            where = where_it_hangs(child.pid)
            what = f"no answer within {deadline_s:g} s" + (f", {where}" if where else "")
            if not child.stop() and stuck:
                stuck.remember(key, child.pid, what)
            raise TimeoutError(errno.ETIMEDOUT, what, path)
    finally:
        child.close()
    child.stop()
    code, _, step = answer.partition(" ")
    if not code.isdigit():
        raise OSError(errno.EIO, "the probe died", path)
    if int(code):
        raise OSError(int(code), f"{os.strerror(int(code))} ({step})", path)


def _answer(child: Child, deadline_s: float) -> str | None:
    """Wait for the child's answer; None at the deadline."""
    limit = time.monotonic() + deadline_s
    poll = select.poll()
    poll.register(child.fd, select.POLLIN)
    while (left := limit - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            return child.read().decode("ascii", "replace")
    return None


def _probe(fd: int, path: str, write: bool) -> None:
    """The child: the errno of the first step that failed, 0 if none did."""
    step = "stat"
    try:
        os.stat(path)  # noqa: PTH116
        step = "list"
        with os.scandir(path) as entries:
            for _, _ in zip(entries, range(_LISTED), strict=False):
                pass
        if write:
            step = "write"
            _write(path)
    except OSError as err:
        write_all(fd, f"{err.errno or errno.EIO} {step}".encode())
    else:
        write_all(fd, b"0 done")


def _write(path: str) -> None:
    """Make a file, fill it, remove it: in the directory that was opened, whatever its name is."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Random: where users may write too, none of them can create the name first.
    name = f".robust-probe.{os.uname().nodename}.{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        write_all(file, b"robust-slurm probes this file system\n")
        os.close(file)  # NFS tells of a failed write here
    finally:
        os.unlink(name, dir_fd=directory)


def run(
    argv: Sequence[str], deadline_s: float, started: Callable[[int], None] | None = None
) -> CommandOutput:
    """Run a program (absolute path) in its own session, without our environment and descriptors.

    ``started`` is called with its pid.
    """
    if not argv or not argv[0].startswith("/"):
        raise OSError(errno.ENOENT, "not an absolute path", argv[0] if argv else "")
    limit = time.monotonic() + deadline_s
    out_read, out_write = os.pipe2(os.O_CLOEXEC)
    err_read, err_write = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.posix_spawn(
            argv[0],
            list(argv),
            _ENVIRONMENT,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out_write, 1),
                (os.POSIX_SPAWN_DUP2, err_write, 2),
            ],
            setsid=True,
            setsigdef=[signal.SIGPIPE],
        )
    except OSError:
        os.close(out_read)
        os.close(err_read)
        raise
    finally:
        os.close(out_write)
        os.close(err_write)
    child = Child(pid, out_read)
    streams = {out_read: b"", err_read: b""}
    try:
        if started is not None:
            started(pid)
        code = _drain(child, streams, limit)
        if code is None:
            where = where_it_hangs(pid)
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"did not end within {deadline_s:g} s" + (f", {where}" if where else ""),
                argv[0],
            )
        texts = [streams[fd].decode("utf-8", "replace") for fd in (out_read, err_read)]
        return CommandOutput(code, *texts)
    finally:
        if not child.stop():
            Stuck().remember(f"command {argv[0]}", pid, "did not end")
        os.close(out_read)
        os.close(err_read)


def _drain(child: Child, streams: dict[int, bytes], limit: float) -> int | None:
    """Read both streams until the program ends; its exit code, or None at the deadline.

    Processes that it left running may hold the streams open: only its own end counts.
    """
    poll = select.poll()
    for fd in streams:
        os.set_blocking(fd, False)
        poll.register(fd, select.POLLIN)
    pause = 0.001
    is_open = set(streams)
    code = None
    while code is None and time.monotonic() < limit:
        ready = [fd for fd, _ in poll.poll(pause * 1000)] if is_open else []
        if not ready:
            code = child.ended(0.0 if is_open else pause)
            pause = min(pause * 2, 0.02)
        for fd in ready:
            if not _more(fd, streams):
                poll.unregister(fd)
                is_open.discard(fd)
    for fd in is_open if code is not None else ():
        _more(fd, streams)
    return code


def _more(fd: int, streams: dict[int, bytes]) -> bool:
    """Take what has come on one stream; False at its end."""
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return True
    room = _OUTPUT_LIMIT - len(streams[fd])
    streams[fd] += data[:room]
    return bool(data)
