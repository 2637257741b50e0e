"""The ranks' side of the data process: a thread for each rank's connection."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_slurm.data.accepting import accept_all
from robust_slurm.data.service import wire
from robust_slurm.data.service.producer import Failure, Wanted, digest
from robust_slurm.frames import json_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from robust_slurm.data.service.producer import Producer

MOST = 1024  # connections
LINGER = 2.0  # s for ranks to be told of a plan that cannot be made


class Server:
    """Accepts ranks on a listening socket that robust-task has made."""

    def __init__(
        self,
        listener: socket.socket,
        producer: Producer,
        placed: Callable[[object], None] = lambda _nodes: None,
    ) -> None:
        """``placed`` is told what ranks know of the job's nodes."""
        self._producer = producer
        self._placed = placed
        self._lock = threading.Lock()
        self._lines: set[wire.Line] = set()
        self._cpus: set[int] = set()
        accept = partial(accept_all, listener, self._begin)
        threading.Thread(target=accept, name="data-door", daemon=True).start()

    def _begin(self, sock: socket.socket) -> None:
        with self._lock:
            full = len(self._lines) >= MOST
        if full or not json_lines.ours(json_lines.peer(sock)[1]):
            sock.close()
            return
        line = wire.Line(sock)
        thread = threading.Thread(target=self._serve, args=(line,), name="data-rank", daemon=True)
        thread.start()

    def wait_told(self) -> None:
        """Return when no rank is there any more that has to be told, or after some time."""
        until = time.monotonic() + 5 * LINGER
        time.sleep(LINGER)
        while time.monotonic() < until and self._lines:
            time.sleep(0.05)

    def _serve(self, line: wire.Line) -> None:
        with self._lock:
            self._lines.add(line)
        try:
            self._listen(line)
        except OSError:
            pass  # it has gone
        finally:
            with self._lock:
                self._lines.discard(line)
            line.close()

    def _listen(self, line: wire.Line) -> None:
        shares: tuple[int, ...] = ()
        state: Any = None
        name = digest(None)
        while (got := line.receive(None)) is not None:
            message, fds = got
            for fd in fds:  # nobody has asked for any
                os.close(fd)
            if message["op"] == "hello":
                self._run_beside(message.get("cpus"))
                self._placed(message.get("nodes"))
                shares = self._welcome(line, message)
            elif message["op"] == "seek":
                state = message.get("state")
                name = digest(state)
            elif message["op"] == "next" and shares:
                wanted = Wanted(name, state, shares)
                state, name = self._next(line, wanted)
            else:
                raise wire.Closed("not understood")

    def _welcome(self, line: wire.Line, message: dict[str, Any]) -> tuple[int, ...]:
        rank, world, original, beside = (
            _whole(message, name) for name in ("rank", "world", "original", "beside")
        )
        say = lambda: line.send({"op": "wait"})  # noqa: E731
        got = self._producer.shares(rank, world, original, beside, say)
        if got is None or isinstance(got, Failure):
            _fail(line, got)
            return ()
        line.send({"op": "welcome", "shares": got})
        return got

    def _next(self, line: wire.Line, wanted: Wanted) -> tuple[Any, str]:
        """Answer; return the state after the step and its name; without a step, the same."""
        got = self._producer.get(wanted, lambda: line.send({"op": "wait"}))
        if got is None or isinstance(got, Failure):
            _fail(line, got)
            return wanted.state, wanted.name
        made, fds = got
        try:
            pages = [[share, made.pages[share].head()] for share in wanted.shares]
            step = {"number": made.number, "state": made.state, "pages": pages}
            line.send({"op": "step", **step}, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return made.state, made.after

    def _run_beside(self, cpus: object) -> None:
        """Use the processors of all ranks here, not just those of the one that was bound first."""
        if isinstance(cpus, list) and all(type(cpu) is int and 0 <= cpu < 1 << 16 for cpu in cpus):
            with self._lock:
                self._cpus.update(cpus)
                wanted = set(self._cpus)
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), wanted)


def _fail(line: wire.Line, failure: Failure | None) -> None:
    if failure is None:
        raise wire.Closed("it ends")
    line.send({"op": "failed", "kind": failure.kind, "why": failure.why})


def _whole(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if type(value) is not int or not 0 <= value < 1 << 30:
        raise wire.Closed("not understood")
    return value
