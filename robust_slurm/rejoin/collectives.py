"""Gets a rank out of torch's collectives, from another thread, and takes its process groups down.

NCCL communicators are aborted. gloo has no abort (that of torch 2.13 does nothing): its sockets are
shut down, upon which its collectives raise. They are known from the process groups' making: torch's
two functions that open sockets are wrapped while ``resilient`` runs. Where torch has other ones, a
rank that waits in gloo does not answer in time, and is replaced as before.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
from contextlib import contextmanager, suppress
from functools import partial

from robust_slurm.auto import teardown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_MAKERS = ("_new_process_group_helper", "rendezvous")
_BROKEN = re.compile(
    r"gloo|NCCL|TCPStore|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|Socket|"
    r"process group|remote process|aborted"
)
_TCP = (socket.AF_INET, socket.AF_INET6)
_LISTENS = socket.SO_ACCEPTCONN
SERVICES = 1024
"""Ports below belong to services, as that of HTTPS; gloo and torch's store use none of them."""
_kept: list[Any] = []
_DISTRIBUTED = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")


def by_peers(error: BaseException) -> bool:
    """True for an error that another rank's end, or an abort, brings about in a collective (pure).

    It only decides whether an order to rejoin is waited for; without one the error is raised.
    """
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if any(kind in _DISTRIBUTED for kind in kinds):
        return True
    # Nothing is assumed about a program's own subclasses of RuntimeError.
    return type(error) is RuntimeError and bool(_BROKEN.search(str(error)))


class Sockets:
    """The sockets of this process that torch's process groups have opened."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._before: list[set[str]] = []  # of each maker that runs now
        self._made: list[Any] = []  # process groups, see ``next_round``
        self._restore: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Wrap torch's functions, if the script has imported torch and that has them."""
        if "torch" not in sys.modules:
            return
        import torch.distributed

        c10d: Any = sys.modules.get(_C10D)
        if c10d is None or not torch.distributed.is_available():
            return
        for name in _MAKERS:
            made = getattr(c10d, name, None)
            if callable(made):
                setattr(c10d, name, self._watched(made))
                self._restore.append(partial(setattr, c10d, name, made))

    def unwatch(self) -> None:
        _kept.extend(self._made)
        while self._restore:
            self._restore.pop()()

    def _watched(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._opening():
                found = made(*args, **kwargs)
            if hasattr(found, "__next__"):
                return self._each(found)
            self._made.append(found)
            return found

        return watched

    def _each(self, found: Iterator[Any]) -> Iterator[Any]:
        """Watch each step of a generator."""
        while True:
            with self._opening():
                try:
                    item = next(found)
                except StopIteration:
                    return
            yield item

    @contextmanager
    def _opening(self) -> Iterator[None]:
        before = _tcp()
        self._before.append(before)
        try:
            yield
        finally:
            self._before.remove(before)
            self._known |= _tcp() - before

    def shut(self) -> None:
        """Shut them all down, so that whatever waits on them raises. Any thread may call it."""
        known = self._known.copy()
        for before in list(self._before):
            known |= _tcp() - before
        for number, name in _descriptors():
            if name in known:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
                    if _name(one.fileno()) != name:
                        continue  # another thread has closed it, and opened something else
                    listens = one.getsockopt(socket.SOL_SOCKET, _LISTENS)
                    if one.family in _TCP and not listens and not _to_service(one):
                        one.shutdown(socket.SHUT_RDWR)

    def next_round(self) -> None:
        """Forget the sockets. The groups are kept until those that follow have been in use.

        To drop the last reference to a group that gloo's thread is busy with is to wait for that
        thread with the GIL held, and that thread may wait for the GIL (torch 2.13). So DDP must not
        be the one that drops it.
        """
        self._known.clear()
        _kept[:], self._made = self._made, []


def abort_nccl() -> bool:
    """Abort all NCCL communicators, as one group call; False if there are none. Raises anything."""
    c10d: Any = sys.modules.get(_C10D)
    if c10d is None or not teardown.groups(c10d):
        return False
    _keep(c10d)  # now: the function may take them down itself, in a finally clause
    teardown.abort(c10d)
    return True


def _keep(c10d: Any) -> None:
    """Have the NCCL groups live on in memory, beyond the end of Python too.

    The destructor of an aborted group waits for torch's watchdog, at times for ever (seen with
    torch 2.11 on a GPU).
    """
    for group in teardown.groups(c10d):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def has_nccl() -> bool:
    c10d: Any = sys.modules.get(_C10D)
    return c10d is not None and bool(teardown.groups(c10d))


def initialized() -> bool:
    """True if this process has a process group."""
    distributed: Any = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def take_down() -> None:
    """Take all process groups out of torch's tables, in the training's thread. Raises anything."""
    if not initialized():
        return
    c10d: Any = sys.modules[_C10D]
    _keep(c10d)
    abort = getattr(c10d, "_abort_process_group", None)  # does not wait for other ranks
    (abort or c10d.destroy_process_group)()


def _tcp() -> set[str]:
    return {name for _, name in _descriptors()}


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield this process's sockets: the number and the name that the kernel gives it."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are what is wanted
        try:
            name = _name(entry)
        except OSError:  # closed meanwhile
            continue
        if name.startswith("socket:"):
            yield int(entry), name


def _name(descriptor: int | str) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115


def _to_service(one: socket.socket) -> bool:
    try:
        return int(one.getpeername()[1]) < SERVICES
    except OSError:  # not connected yet
        return False
