"""Aborts the rank's NCCL communicators when the shim asks for it, before it kills the rank.

A process that dies with open communicators leaves its NVLink peers with hardware errors. A thread
waits on a socket beside the heartbeat's record; it is there only in ranks that have communicators
at their first step. An aborted collective returns as if it had succeeded, with any data: so nothing
more is reported or saved, no copy under way becomes a snapshot, the main thread stands still from
then on, and the process ends at once, without its ``finally`` clauses and exit handlers, as SIGTERM
and SIGKILL would end it. A save begun there would be cut off in the middle.

Runs in the rank: standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

from robust_slurm.auto.listen import listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_SNAPSHOT = "robust_slurm.checkpoint.copying.snapshot"
SUFFIX = ".abort"  # of the socket beside a record of the heartbeat (``layout.beside``)
ABORT = b"a"
DONE = b"d"
ENDED = 143  # exit code of a rank that ends here: as if by SIGTERM
_held: list[Any] = []  # what Python has yet to call


def offer(path: str, silence: Callable[[], None]) -> None:
    """Listen, if this process has NCCL communicators; ``silence`` ends its heartbeat.

    Raises OSError.
    """
    c10d = sys.modules.get(_C10D)
    if c10d is None or not groups(c10d):
        return
    listen(path, 8, _wait, c10d, silence)


def groups(c10d: Any) -> list[Any]:
    """The process groups of this rank that use NCCL, the youngest first."""
    world = c10d._world
    found = [
        group
        for group, (backend, _store) in list(world.pg_map.items())
        if "nccl" in str(backend) or "nccl" in str(world.pg_backend_config.get(group, ""))
    ]
    return sorted(found, key=lambda group: str(world.pg_names.get(group, "")), reverse=True)


def _wait(line: socket.socket, c10d: Any, silence: Callable[[], None]) -> None:
    while True:
        try:
            asker, _ = line.accept()
        except OSError:  # of an epoch that is over
            return
        try:
            if asker.recv(1) == ABORT:
                _serve(asker, c10d, silence)
                return
            asker.close()
        except Exception as error:  # noqa: BLE001 - the shim kills the rank in any case
            _warn(error)
            return


def _serve(asker: socket.socket, c10d: Any, silence: Callable[[], None]) -> None:
    try:
        silence()
        _hold_main_thread()
        abort(c10d)
        asker.sendall(DONE)
    except Exception as error:  # noqa: BLE001 - the shim kills the rank in any case
        _warn(error)
        return
    os._exit(ENDED)


def _hold_main_thread() -> None:
    """Have the main thread stand still when it comes back from what it calls, where that can be.

    A program that logged a loss, or saved weights by itself, would do it with what aborted
    collectives return.
    """

    def stand(_: object) -> int:
        while True:
            try:
                threading.Event().wait()
            except BaseException:  # noqa: BLE001 - of a signal's handler; the process ends anyhow
                pass

    try:
        _held.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(stand))
        ctypes.pythonapi.Py_AddPendingCall(_held[-1], None)
    except Exception:  # noqa: BLE001 - MemoryError where no memory may be made executable
        pass  # to abort is worth more


def _warn(error: object) -> None:
    try:
        sys.stderr.write(f"robust-slurm: communicators not aborted: {error!r}\n")
    except (AttributeError, OSError, ValueError):
        pass


def abort(c10d: Any) -> None:
    """Abort all groups as one NCCL group call, as torch's _abort_process_group does.

    That function also takes the groups out of torch's tables, under a main thread that uses them.
    What is being copied meanwhile becomes no snapshot.
    """
    halted = getattr(sys.modules.get(_SNAPSHOT), "halted", None)  # it may just be imported
    if halted is not None:
        halted.set()
    found = groups(c10d)
    backends = [backend for backend in map(_nccl, found) if backend is not None]
    together = next((b for b in backends if hasattr(b, "_group_start")), None)
    if together is not None:
        together._group_start()
    try:
        for backend in backends:
            # abort: torch 2.6 and later; _shutdown: 2.2 to 2.5, and it aborts as well
            call = getattr(backend, "abort", None) or getattr(backend, "_shutdown", None)
            if call is not None:
                call()
    finally:
        if together is not None:
            together._group_end()


def _nccl(group: Any) -> Any:
    import torch

    try:
        return group._get_backend(torch.device("cuda"))
    except RuntimeError:  # it has none for GPUs
        return None
