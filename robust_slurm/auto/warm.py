"""A warm interpreter: has imported what the script needs, and becomes a rank by fork.

The shim starts it as it starts a rank: same command, same environment, same streams. It gets as
far as ``sitecustomize``, which calls ``serve``: that imports what an earlier rank had imported by
its first step, and then waits. At each request it forks, and in the child ``serve`` returns: there
the interpreter goes on to the script as if nothing had happened, with a process, streams and an
environment of its own. Forking takes its time where many start at once, so the request may also be
for a stand-in: a child that waits for the rank's request itself.

It never touches a GPU, and gives up where a fork would not be what a fresh start is: when a module
starts a thread or opens a GPU, when a source file has changed, when the script would find another
module under the same name.

Runs in interpreters that are not ours: standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys
import time

from robust_slurm.auto import listening
from robust_slurm.auto.headroom import headroom
from robust_slurm.auto.importing import import_all
from robust_slurm.auto.line import give_up, receive, send
from robust_slurm.auto.script import Script
from robust_slurm.auto.shown import PAD, Shown, own
from robust_slurm.auto.sources import Sources, different

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Sequence
    from typing import Any

VARIABLE = "ROBUST_WARM_FD"  # ROBUST_WARM is a setting of robust-srun's
"""Number of the descriptor that leads to the shim."""
ROOM = 2 << 30  # bytes that must be free before importing, of which it takes a quarter
_PR_SET_PDEATHSIG = 1
_ahead: _Ahead | None = None
"""Set in a process that runs the script ahead and is no rank yet."""
forked = False
"""Set in a rank: what it imports was known before."""


def serve(fd: int, known: Collection[str]) -> float:
    """Return only in a process that is to be a rank: the time at which its script may go on.

    The time is for ``listening.hold``. ``fd``: a socket to the shim; ``known``: the modules that
    were loaded before ours.
    """
    try:
        return _serve(fd, known)
    except BaseException as error:  # noqa: BLE001 - it must never get as far as the script
        give_up(fd, f"{type(error).__name__}: {error}")


def _serve(fd: int, known: Collection[str]) -> float:
    import fcntl
    import gc
    import json
    import socket

    global _ahead
    script = Script()
    shim, null = os.getppid(), os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):  # the first rank has printed what modules print when they are imported
        os.dup2(null, stream)
    os.close(null)
    link = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    before = dict(os.environ)
    before.pop(PAD, None)
    own(before)
    shown = Shown()
    script.begin(shown.words)
    shown.change("robust-warm", ["robust-warm:", *shown.words], ())
    hearing = _turn_deaf()
    order, _ = receive(link)
    with open(order["learnt"], "rb") as file:
        learnt = json.load(file)
    listening.visits = bool(learnt.get("store"))
    umask = os.umask(0o077)
    os.umask(umask)
    for name, value in learnt["environ"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    with open(order["lock"], "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one interpreter of a node at a time
        sources = _prepare(order, learnt, before, known)
    gc.freeze()  # the pages stay shared with the ranks
    send(link, {"ready": 1, "arguments": len(sys.argv) - 1})
    while True:
        request, fds = _wait(link, sources, script)
        if _fork():
            os.umask(umask)
            _leave(shim)
            if "stand_in" in request:
                request, fds = _stand_in(link, request, fds, sources, script)
            _hear(hearing)
            if "numpy.random" in sys.modules:  # as in a fresh process; Python's does it by itself
                sys.modules["numpy.random"].seed()
            _go(request["directory"])
            own(request["environ"])
            if "ahead" in request:  # as far as the script's ``standby_point``
                _ahead = _Ahead(link, shown, known, request)
                return 0.0
            path = script.of(request["words"], request["directory"])
            script.become(request["words"], path, shown.words)
            _become(link, fds, shown)
            return float(request["begin"])
        for each in fds:
            os.close(each)


def _turn_deaf() -> dict[int, Any]:
    """Ignore signals for the job: they are for its ranks. Return the handlers before."""
    import signal

    names = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGALRM", "SIGCONT")
    numbers = [getattr(signal, name) for name in names]
    return {number: signal.signal(number, signal.SIG_IGN) for number in numbers}


def _hear(handlers: dict[int, Any]) -> None:
    """Restore these handlers in the rank, unless an imported module has set its own."""
    import signal

    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def _prepare(
    order: dict[str, Any], learnt: dict[str, Any], before: dict[str, str], known: Collection[str]
) -> Sources:
    """Import the modules; return their files. ``before``: the environment to restore."""
    import gc

    room = headroom()
    if room < ROOM:
        raise MemoryError(f"only {room >> 20} MiB are left for a warm interpreter")
    since = time.time()
    import_all(learnt["modules"], order["named"])
    own(before)
    elsewhere = different(learnt["modules"])
    if elsewhere:
        raise RuntimeError(f"the script finds another module {elsewhere}")
    sources = Sources(known, sys.argv[0], since)
    _flush()
    gc.collect()
    return sources


def _flush() -> None:
    """Flush output printed so far to where the streams lead now: it belongs to no rank."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


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


def _stand_in(
    link: socket.socket,
    request: dict[str, Any],
    fds: Sequence[int],
    sources: Sources,
    script: Script,
) -> tuple[dict[str, Any], list[int]]:
    """Wait in a process that was forked before it is needed; return the request that it becomes.

    ``link`` then leads to this process alone.
    """
    send(link, {"pid": os.getpid(), "stand_in": request["stand_in"]})
    (fd,) = fds
    os.dup2(fd, link.fileno(), inheritable=False)
    os.close(fd)
    sources.rehearse()
    return _wait(link, sources, script)


def _go(directory: str) -> None:
    """Work there, as if started there: children of multiprocessing import from that place."""
    os.chdir(directory)
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.__dict__["ORIGINAL_DIR"] = os.getcwd()  # noqa: PTH109


def _leave(shim: int) -> None:
    """Leave the session, as a rank that robust-task starts, and end with robust-task."""
    import ctypes
    import signal

    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != shim:
        os._exit(1)  # it had gone before


def _become(link: socket.socket, fds: Sequence[int], shown: Shown) -> None:
    import importlib

    global forked
    forked = True
    for fd, stream in zip(fds, (1, 2)):  # noqa: B905 - Python 3.9
        os.dup2(fd, stream)
        os.close(fd)
    environ = (f"{name}={value}" for name, value in os.environ.items())
    shown.change(shown.name, shown.words, environ)
    importlib.invalidate_caches()
    send(link, {"pid": os.getpid()})
    link.close()


# -- running the script ahead


class _Ahead:
    """A process that runs the script as far as its ``standby_point``, and how it began."""

    def __init__(
        self,
        link: socket.socket,
        shown: Shown,
        known: Collection[str],
        request: dict[str, Any],
    ) -> None:
        self.link = link
        self.shown = shown
        self.known = known
        self.program = sys.argv[0]
        self.environ: dict[str, str] = request["environ"]
        self.directory: str = request["directory"]
        self.since = time.time()


def standby() -> None:
    """The script's ``standby_point``: a process that runs ahead waits here until it is a rank."""
    global _ahead
    ahead = _ahead
    if ahead is None:
        return
    _flush()
    try:
        sources = Sources(ahead.known, ahead.program, ahead.since)
        send(ahead.link, {"ready": 1})
        request, fds = _wait(ahead.link, sources)
        if request["directory"] != ahead.directory:
            raise RuntimeError(f"it is to run in {request['directory']}")
        # A directory of the script's own choice stays, and so does its environment.
        own(merged(ahead.environ, dict(os.environ), request["environ"]))
        _ahead = None
        _become(ahead.link, fds, ahead.shown)
    except BaseException as error:  # noqa: BLE001 - the shim starts the rank, and this must not be it
        give_up(ahead.link.fileno(), f"{type(error).__name__}: {error}")
    listening.hold(float(request["begin"]))


def merged(first: dict[str, str], changed: dict[str, str], rank: dict[str, str]) -> dict[str, str]:
    """The environment of a rank with what the script has made of its ``first`` one. Raises
    RuntimeError if it changed what the rank is given: who knows what it would have done then."""
    result = dict(rank)
    for name in {*first, *changed}:
        if first.get(name) == changed.get(name):
            continue
        if first.get(name) != rank.get(name):
            raise RuntimeError(f"the script has set {name}, which is a rank's own")
        if name in changed:
            result[name] = changed[name]
        else:
            result.pop(name, None)
    return result


# -- the shim's requests


def _wait(
    link: socket.socket, sources: Sources, script: Script | None = None
) -> tuple[dict[str, Any], list[int]]:
    """The next request. Raises RuntimeError when a fresh start would differ. ``script``: the
    request may be for another script in its place; None: the script runs already."""
    from select import select

    while not select([link], [], [], sources.due())[0]:
        sources.recheck()
    request, fds = receive(link)
    if "stand_in" not in request:
        path = ""
        if script is not None:
            path = script.of(request["words"], request["directory"])
            script.check(path, "ahead" in request)
            script.check_settings(request["words"], request["directory"])
        sources.check_request(request["directory"], path)
        sources.check_code(request["environ"])
    return request, fds
