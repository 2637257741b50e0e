"""Facts that the kernel shows of a process: for which file it waits, whether it writes, its dead.

All of it can be read by the process's own user, where robust-task is its ancestor. /proc/PID/stack
is root's only, and not read. The files themselves are not touched: a dead server would block us.
"""

from __future__ import annotations

import os
import platform
import re
import signal
from collections.abc import Mapping, Sequence
from mmap import PAGESIZE
from pathlib import Path

from robust_slurm import process_stat
from robust_slurm.text import one_line
from srun_wrapper.agent.processes.process_tree import children

WORD = 96  # characters
NAME = 16  # of a process, as the kernel cuts it
CHILDREN = 2  # killed ones that are shown
_EXIT_CODE = 49  # of a zombie, in ``ProcessStat.fields``: as wait() would return it
_X86 = (
    "0 read,1 write,2 open,3 close,4 stat,5 fstat,6 lstat,16 ioctl,17 pread64,18 pwrite64,"
    "19 readv,20 writev,42 connect,43 accept,44 sendto,45 recvfrom,46 sendmsg,47 recvmsg,"
    "72 fcntl,73 flock,74 fsync,75 fdatasync,82 rename,83 mkdir,87 unlink,217 getdents64,"
    "257 openat,262 newfstatat,288 accept4,332 statx"
)
_ARM = (
    "25 fcntl,29 ioctl,32 flock,56 openat,57 close,61 getdents64,63 read,64 write,65 readv,"
    "66 writev,67 pread64,68 pwrite64,79 newfstatat,80 fstat,82 fsync,83 fdatasync,202 accept,"
    "203 connect,206 sendto,207 recvfrom,211 sendmsg,212 recvmsg,242 accept4,291 statx"
)
_TABLES = {"x86_64": _X86, "aarch64": _ARM}
_WAITS = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)
_OF_A_FILE = re.compile(
    r"p?(read|write)(64|v)?|ioctl|f(data)?sync|flock|fcntl|fstat|close|getdents64"
    r"|recv(from|msg)|send(to|msg)|connect|accept4?"
)

_ON_STORAGE = re.compile(r"p?(read|write)(64|v)?|f(data)?sync|fstat|close|getdents64")
_BY_PATH = {  # the argument that is the path
    **dict.fromkeys(("open", "stat", "lstat", "rename", "mkdir", "unlink"), 0),
    **dict.fromkeys(("openat", "newfstatat", "statx"), 1),
}
_NO_STORAGE = ("/dev/", "/proc/", "/sys/")
_NO_DEVICE = ("/dev/shm/", "/dev/pts/", "/dev/tty", "/dev/fuse", "/dev/null")
_HERE = 0xFFFFFF9C  # AT_FDCWD as a descriptor
_PATH = 1024  # bytes of a path that are read


CALLS = dict(pair.split() for pair in _TABLES.get(platform.machine(), "").split(",") if pair)


def waited_device(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the device for which the main thread waits in a system call; "" if none."""
    base = proc / str(pid)
    words = _read(base / "syscall").split()
    if len(words) < 2 or not _OF_A_FILE.fullmatch(CALLS.get(words[0], "")):
        return ""
    try:
        path = _link(base, words[1])
    except (OSError, ValueError):
        return ""
    return path if path.startswith("/dev/") and not path.startswith(_NO_DEVICE) else ""


def waited_file(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the path of the file for which the main thread waits in a system call; "" if none.

    For a process that runs, the kernel shows no system call. Locks of files are not storage.
    """
    base = proc / str(pid)
    words = _read(base / "syscall").split()
    if len(words) < 7 or not words[0].isdigit():
        return ""
    name = CALLS.get(words[0], "")
    try:
        if _ON_STORAGE.fullmatch(name):
            path = _link(base, words[1])
        elif (place := _BY_PATH.get(name)) is not None:
            path = _string(base / "mem", int(words[1 + place], 16))
            if not path.startswith("/"):
                path = f"{_link(base, words[1] if place else hex(_HERE))}/{path}"
        else:
            return ""
    except (OSError, ValueError, OverflowError):
        return ""
    return path if path.startswith("/") and not path.startswith(_NO_STORAGE) else ""


def killed_children(pid: int) -> str:
    """Return the children that a signal has ended and for which the process has not waited."""
    found = []
    for child in children(pid):
        try:
            process = process_stat.read(child)
            signum = int(process.fields[_EXIT_CODE]) & 0x7F if process.ended else 0
            name = signal.Signals(signum).name if signum else ""
        except (OSError, ValueError, LookupError):
            continue
        if name:
            found.append(f"{child} ({one_line(process.name, NAME)}) by {name}")
    more = f" and {len(found) - CHILDREN} more" if len(found) > CHILDREN else ""
    shown = ", ".join(found[:CHILDREN])
    return f"killed and not waited for: its child {shown}{more}" if found else ""


def is_writing(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether one of its threads waits in write(): a signal would cut that short.

    The call returns the number of bytes written so far, and many programs do not write the rest.
    """
    return bool(woken_in_write([pid], proc))


def woken_in_write(pids: Sequence[int], proc: Path = Path("/proc")) -> dict[int, int]:
    """Map the threads that wait in write() to the number of times that they have waited so far.

    Each time, what they write to has taken some bytes, which /proc/PID/io counts at the end only.
    """
    found = {}
    for pid in pids:
        task = proc / str(pid) / "task"
        try:
            tids = os.listdir(task)  # noqa: PTH208
        except OSError:
            continue
        for tid in tids:
            call = _read(task / tid / "syscall").partition(" ")[0]
            if CALLS.get(call) not in ("write", "writev"):
                continue
            waits = _WAITS.search(_read(task / tid / "status"))
            found[int(tid)] = int(waits[1]) if waits else 0
    return found


def drained(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """Return the least number of bytes taken meanwhile from threads that waited in write(). Pure.

    ``before``, ``after``: see ``woken_in_write``.
    """
    return PAGESIZE * sum(max(0, n - before.get(tid, n)) for tid, n in after.items())


def _link(base: Path, word: str) -> str:
    number = int(word, 16) & 0xFFFFFFFF
    link = base / "cwd" if number == _HERE else base / "fd" / str(number)
    return os.readlink(link)  # noqa: PTH115


def _string(memory: Path, address: int) -> str:
    """Return the string at an address. Only pages that the system call has read too are read:
    another one may be a device's, or a file's on a dead server."""
    found, end = b"", address + _PATH
    file = os.open(memory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while address < end and b"\0" not in found:
            size = min(end, (address // PAGESIZE + 1) * PAGESIZE) - address
            if not (part := os.pread(file, size, address)):
                break
            found, address = found + part, address + len(part)
    finally:
        os.close(file)
    return found.partition(b"\0")[0].decode(errors="replace")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
