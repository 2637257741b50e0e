"""A warm interpreter: has imported what the script needs, and becomes a rank by fork.

The shim starts it as it starts a rank: same command, same environment, same streams. It gets as
far as ``sitecustomize``, which calls ``serve``: that imports what an earlier rank had imported by
its first step, and then waits. At each request it forks, and in the child ``serve`` returns: there
the interpreter goes on to the script as if nothing had happened, with a process, streams and an
environment of its own.

It never touches a GPU, and gives up where a fork would not be right: a module that starts threads
or opens a GPU is left to the rank, a source file that has changed since ends it.

Runs in interpreters that are not ours: standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys
import time

from robust_slurm.auto.headroom import headroom
from robust_slurm.auto.shown import PAD, Shown, own

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Sequence
    from typing import Any

VARIABLE = "ROBUST_WARM_FD"  # ROBUST_WARM is a setting of robust-srun's
"""Number of the descriptor that leads to the shim."""
ROOM = 2 << 30  # bytes that must be free before importing, of which it takes a quarter
_THREADS_END_AT_FORK = ("numpy", "scipy")  # OpenBLAS ends its pool before a fork
_NEVER = ("__main__", "sitecustomize", "usercustomize", "robust_slurm")
_PR_SET_PDEATHSIG = 1
_LENGTH = 8
_ahead: tuple[socket.socket, Shown] | None = None


def serve(fd: int) -> None:
    """Return in a process that is to be a rank, and only there. ``fd``: a socket to the shim."""
    try:
        _serve(fd)
    except BaseException as error:  # noqa: BLE001 - it must never get as far as the script
        _give_up(fd, f"{type(error).__name__}: {error}")


def _serve(fd: int) -> None:
    import json
    import socket

    shim, null = os.getppid(), os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # what modules say when they are imported, the first rank has said
        os.dup2(null, stream)
    os.close(null)
    link = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    before = dict(os.environ)
    before.pop(PAD, None)
    own(before)
    shown = Shown()
    shown.change("robust-warm", ["robust-warm:", *shown.words], ())
    hearing = _turn_deaf()
    order, _ = _receive(link)
    with open(order["learnt"], "rb") as file:
        learnt = json.load(file)
    umask = os.umask(0o077)
    os.umask(umask)
    for name, value in learnt["environ"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    with open(order["lock"], "rb") as lock:
        _one_at_a_time(lock)
        room = headroom()
        if room < ROOM:
            raise MemoryError(f"only {room >> 20} MiB are left for a warm interpreter")
        _import(learnt["modules"], order["named"])
    own(before)
    files = {path: _stamp(path) for path in _files()}
    _settle()
    _send(link, {"ready": len(sys.modules)})
    while True:
        request, fds = _receive(link)
        changed = next((path for path, stamp in files.items() if _stamp(path) != stamp), None)
        if changed is not None:
            _give_up(fd, f"{changed} has changed")
        if _fork():
            os.umask(umask)
            _leave(shim)
            _hear(hearing)
            if len(fds) > 2:
                _go_ahead(link, request, fds, shown)
            else:
                _become(link, request, fds, shown)
            return
        for each in fds:
            os.close(each)


def _turn_deaf() -> dict[int, Any]:
    """Signals for the job are for its ranks. Returns what was done with them before."""
    import signal

    names = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGALRM", "SIGCONT")
    numbers = [getattr(signal, name) for name in names]
    return {number: signal.signal(number, signal.SIG_IGN) for number in numbers}


def _hear(handlers: dict[int, Any]) -> None:
    """In the rank, unless a module that was imported has its own handler there."""
    import signal

    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def _one_at_a_time(lock: Any) -> None:
    """Importing takes a processor for seconds, which the training should not notice."""
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_EX)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _settle() -> None:
    import gc

    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    gc.collect()
    gc.freeze()  # its pages stay shared with the ranks


# -- importing


def _import(modules: Sequence[Sequence[str]], named: Sequence[str]) -> None:
    """Import what is installed, and packages that are ``named``.

    Other modules of the script's are the rank's to import: they may do anything then.
    """
    from importlib import import_module
    from importlib.util import find_spec

    installed, threads = _installed(), _threads()
    usable: dict[str, bool] = {}
    # First, or their threads would count as those of who imports them.
    first = [m for m in modules if m[0].partition(".")[0] in _THREADS_END_AT_FORK]
    for name, origin in [*first, *modules]:
        top = name.partition(".")[0]
        if name in sys.modules or top in _NEVER or not usable.get(top, True):
            continue
        ours = origin in ("built-in", "frozen") or origin.startswith(installed)
        if not ours and top not in named:
            continue
        if top not in usable:
            found = find_spec(top)
            usable[top] = found is not None
            if name == top and (found is None or found.origin != origin):
                usable[top] = False
            if not usable[top]:
                continue
        try:
            import_module(name)
        except Exception:  # noqa: BLE001 - the rank's to see, if it imports this at all
            continue
        now = _threads()
        if now > threads and top not in _THREADS_END_AT_FORK:
            raise RuntimeError(f"importing {name} starts a thread, so it cannot be done ahead")
        threads = now
    _check_fork()


def _installed() -> tuple[str, ...]:
    """Directories of installed modules."""
    import site
    import sysconfig

    paths = [sysconfig.get_path(n) for n in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({os.path.join(path, "") for path in paths if path})  # noqa: PTH118


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def _check_fork() -> None:
    """Raises RuntimeError when a child of this process could not do what a fresh one can."""
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
        raise RuntimeError("a thread runs after importing, so it cannot be done ahead")
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        raise RuntimeError("importing initialises CUDA, so it cannot be done ahead")
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue
        if target.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri")):
            raise RuntimeError(f"importing opens {target}, so it cannot be done ahead")


def _files() -> Iterable[str]:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            yield path


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        info = os.stat(path)  # noqa: PTH116
    except OSError:
        return (0, 0, 0)
    return (info.st_mtime_ns, info.st_size, info.st_ino)


# -- becoming a rank


def _fork() -> bool:
    """True in a new process, which is the shim's child as soon as the one between has ended."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0001)
    return True


def _leave(shim: int) -> None:
    """As what robust-task starts: a session of its own, that ends with robust-task."""
    import ctypes
    import signal

    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != shim:
        os._exit(1)  # it had gone before


def _go_ahead(
    link: socket.socket, request: dict[str, Any], fds: Sequence[int], shown: Shown
) -> None:
    """Run the script as far as its ``standby_point``."""
    import socket

    global _ahead
    for fd in fds[:2]:
        os.close(fd)
    _send(link, {"pid": os.getpid()})
    link.close()
    os.chdir(request["directory"])
    own(request["environ"])
    _ahead = socket.socket(fileno=fds[2]), shown


def standby() -> None:
    """The script's ``standby_point``: whoever runs ahead waits here until it is a rank."""
    global _ahead
    if _ahead is None:
        return
    (link, shown), _ahead = _ahead, None
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # as with imports: it is not a rank's yet
    _send(link, {"ready": 1})
    request, fds = _receive(link)
    _become(link, request, fds, shown)


def _become(link: socket.socket, request: dict[str, Any], fds: Sequence[int], shown: Shown) -> None:
    import importlib

    for fd, stream in zip(fds, (1, 2)):  # noqa: B905 - Python 3.9
        os.dup2(fd, stream)
        os.close(fd)
    os.chdir(request["directory"])
    own(request["environ"])
    count = len(sys.argv) - 1
    arguments = request["words"][len(request["words"]) - count :]
    for words in (sys.argv, getattr(sys, "orig_argv", sys.argv), shown.words):
        words[len(words) - count :] = arguments
    environ = (f"{name}={value}" for name, value in os.environ.items())
    shown.change(shown.name, shown.words, environ)
    importlib.invalidate_caches()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # as in a fresh process; Python's own does it by itself
    _send(link, {"pid": os.getpid()})
    link.close()


# -- talking to the shim


def _receive(link: socket.socket) -> tuple[Any, list[int]]:
    """A message and the descriptors that came with it; the end of the shim is our end."""
    import array
    import json
    import socket

    fds = array.array("i")
    room = socket.CMSG_SPACE(4 * fds.itemsize)
    head, control, _, _ = link.recvmsg(_LENGTH, room)
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    while 0 < len(head) < _LENGTH:
        head += link.recv(_LENGTH - len(head)) or b"\0" * _LENGTH
    size, body = int.from_bytes(head, "big"), b""
    while len(body) < size:
        more = link.recv(size - len(body))
        if not more:
            size = 0
            break
        body += more
    if not size:
        os._exit(0)
    return json.loads(body), list(fds)


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    import json

    link.sendall(json.dumps(message).encode() + b"\n")


def _give_up(fd: int, why: str) -> None:
    import json

    try:
        os.write(fd, json.dumps({"over": why[:1000]}).encode() + b"\n")
    finally:
        os._exit(1)
