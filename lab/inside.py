"""Run code in a node's mount namespace, in a short-lived child of the keeper."""

import os
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from lab import linux
from lab.errors import LabError

_WAIT_S = 5.0
_REAP_S = 1.0
_MOST = 256 << 20  # bytes of the machine's memory that a full file system may take


def leave_keeper(*keep: int) -> None:
    """In a forked child: drop the keeper's descriptors and signal handlers."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 4096)


def run(pid: int, work: Callable[[], str | None], keep: int = -1) -> str:
    """Run `work` in the mount namespace of process `pid` and return its result.

    Raises LabError with what it raised, or when it does not end. `keep`: a descriptor it needs.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            leave_keeper(*[fd for fd in (write_end, keep) if fd >= 0])
            os.write(write_end, _answer(pid, work).encode()[:4096])
        finally:
            os._exit(0)
    os.close(write_end)
    try:
        ready = select.select([read_end], [], [], _WAIT_S)[0]
        answer = os.read(read_end, 4096).decode(errors="replace") if ready else ""
    finally:
        os.close(read_end)
        _end(child)
    if not answer.startswith("+"):
        raise LabError(answer.removeprefix("-") or f"no answer from inside in {_WAIT_S:.0f} s")
    return answer[1:]


def _end(child: int) -> None:
    """Kill a child that has nothing left to do; one that cannot die now is reaped later."""
    fd = os.pidfd_open(child)
    os.kill(child, signal.SIGKILL)
    if select.select([fd], [], [], _REAP_S)[0]:
        os.waitpid(child, 0)
    os.close(fd)


def _answer(pid: int, work: Callable[[], str | None]) -> str:
    try:
        linux.enter_namespace(f"/proc/{pid}/ns/mnt")
        return f"+{work() or ''}"
    except (LabError, OSError) as error:
        return f"-{error}"


def kill_all(space: Path) -> None:
    """Send SIGKILL to all processes of a PID namespace, as the kernel will when its first dies."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "ns" / "pid").readlink() == space:
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):  # it ended
            continue


def fill(path: str, name: str, leave: str, own: Sequence[str]) -> str:
    """Fill the file system of directory `path` with a file `name`; return its old size, or "".

    It must be one of the node's `own` tmpfs: all others are the machine's. A tmpfs with more than
    256 MB free is shrunk first. `leave`: bytes to leave free, or "N%" of the size.
    """
    where = Path(path).resolve(strict=True)
    device = where.stat().st_dev
    top = next((top for top in own if Path(top).stat().st_dev == device), None)
    if top is None:
        raise LabError(f"{path} is not on a file system of the node's own: {' '.join(own)}")
    target = where / name
    target.unlink(missing_ok=True)
    found = os.statvfs(where)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    old = ""
    if free > _MOST:
        old = str(total)
        total, free = total - free + _MOST, _MOST
        linux.remount_tmpfs(top, f"size={total}")
    size = (free - to_bytes(leave, total)) // found.f_frsize * found.f_frsize
    if size > 0:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.posix_fallocate(fd, 0, size)
        os.close(fd)
    return old


def to_bytes(leave: str, total: int) -> int:
    """Bytes: "4096", or "5%" of `total`."""
    try:
        part = float(leave.removesuffix("%"))
    except ValueError:
        part = -1.0
    if part < 0:
        raise LabError(f"--leave wants bytes or a percentage, not {leave!r}")
    return int(total * part / 100 if leave.endswith("%") else part)


def unfill(path: str, name: str, old: str) -> None:
    """Undo `fill`."""
    where = Path(path).resolve()
    (where / name).unlink(missing_ok=True)
    if old:
        top = next(p for p in (where, *where.parents) if p.is_mount())
        linux.remount_tmpfs(str(top), f"size={old}")
