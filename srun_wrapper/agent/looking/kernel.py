"""Facts that the kernel shows of a process: state, place in the kernel, system call and its file.

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
OTHERS = 2  # threads in state D that are shown beside the main one, and killed children
_EXIT_CODE = 49  # of a zombie, in ``ProcessStat.fields``: as wait() would return it
_X86 = (
    "0 read,1 write,2 open,3 close,4 stat,5 fstat,6 lstat,7 poll,9 mmap,11 munmap,16 ioctl,"
    "17 pread64,18 pwrite64,19 readv,20 writev,23 select,28 madvise,34 pause,35 nanosleep,"
    "42 connect,43 accept,44 sendto,45 recvfrom,46 sendmsg,47 recvmsg,61 wait4,72 fcntl,73 flock,"
    "74 fsync,75 fdatasync,82 rename,83 mkdir,87 unlink,202 futex,217 getdents64,"
    "219 restart_syscall,230 clock_nanosleep,232 epoll_wait,247 waitid,257 openat,262 newfstatat,"
    "270 pselect6,271 ppoll,281 epoll_pwait,288 accept4,332 statx"
)
_ARM = (
    "22 epoll_pwait,25 fcntl,29 ioctl,32 flock,56 openat,57 close,61 getdents64,63 read,64 write,"
    "65 readv,66 writev,67 pread64,68 pwrite64,72 pselect6,73 ppoll,79 newfstatat,80 fstat,"
    "82 fsync,83 fdatasync,95 waitid,98 futex,101 nanosleep,115 clock_nanosleep,"
    "128 restart_syscall,202 accept,203 connect,206 sendto,207 recvfrom,211 sendmsg,212 recvmsg,"
    "215 munmap,222 mmap,233 madvise,242 accept4,260 wait4,291 statx"
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


def facts(pid: int, proc: Path = Path("/proc")) -> str:
    """Return "state S in futex_do_wait, futex" of the main thread, with the threads in state D."""
    threads = [_thread(proc / str(pid), pid)]
    try:
        tids = sorted(int(name) for name in os.listdir(proc / str(pid) / "task"))  # noqa: PTH208
    except (OSError, ValueError):
        tids = []
    for tid in tids[:256]:
        if len(threads) > OTHERS:
            break
        if tid != pid and state(tid, proc / str(pid) / "task") == "D":
            text = _thread(proc / str(pid) / "task" / str(tid), tid)
            threads.append(f"thread {tid} {text}")
    return "; ".join(text for text in threads if text)


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


def state(tid: int, directory: Path = Path("/proc")) -> str:
    """Return the state of a process or thread as in /proc/PID/stat; "" if it is gone."""
    try:
        return process_stat.read(tid, str(directory)).state
    except (OSError, ValueError):
        return ""


def is_still(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether one of its threads is stopped, traced, or waits for a device (state D)."""
    try:
        tids = os.listdir(proc / str(pid) / "task")  # noqa: PTH208
    except OSError:
        return True
    return any(state(int(tid), proc / str(pid) / "task") in ("", *"DTtZX") for tid in tids)


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
    more = f" and {len(found) - OTHERS} more" if len(found) > OTHERS else ""
    shown = ", ".join(found[:OTHERS])
    return f"killed and not waited for: its child {shown}{more}" if found else ""


def is_writing(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether one of its threads waits in write(): a stop or a signal would cut that short.

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


def _thread(directory: Path, tid: int) -> str:
    now = state(tid, directory.parent)
    if not now:
        return ""
    text = f"state {now}"
    place = _read(directory / "wchan")
    if place not in ("", "0"):
        text += f" in {one_line(place, WORD)}"
    words = _read(directory / "syscall").split()
    if words and words[0].isdigit():
        name = CALLS.get(words[0], f"system call {words[0]}")
        text += f", {name}"
        if _OF_A_FILE.fullmatch(name) and len(words) > 1:
            text += _file(directory, words[1])
    return text


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


def _file(directory: Path, word: str) -> str:
    try:
        path = os.readlink(directory / "fd" / str(int(word, 16)))  # noqa: PTH115
    except (OSError, ValueError):
        return ""
    return f" of {one_line(path, WORD)}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
