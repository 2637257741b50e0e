"""The ranks' side of the data process: a thread for each rank's connection.

Threads wait in accept() themselves, and serve whom they have accepted: a rank that restarts wakes
one thread, and none has to be started for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robust_slurm.data.service import wire
from robust_slurm.data.service.producer import StepFailure
from robust_slurm.data.service.wanted import Wanted, wanted_after
from robust_slurm.frames import json_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from robust_slurm.data.service.made_step import MadeStep
    from robust_slurm.data.service.producer import Producer

MOST = 1024  # connections
SPARE = 16  # threads that wait for further ones, when these have ended
PAUSE = 0.05  # s after an error that may well recur: a limit of the user, the job or the node
LINGER = 2.0  # s for ranks to be told of a plan that cannot be made


class RankServer:
    """Accepts ranks on a listening socket that robust-task has made."""

    def __init__(
        self,
        listener: socket.socket,
        producer: Producer,
    ) -> None:
        self._producer = producer
        self._placed: Callable[[object], None] | None = None
        self._nodes: object = None
        self._lock = threading.Lock()
        self._lines: set[wire.LineSocket] = set()
        self._cpus: set[int] = set()
        self._listener = listener
        self._threads = self._spare = 0  # in all, and those in accept()
        self._most_spare = SPARE
        listener.settimeout(None)
        while not self._more(1):
            time.sleep(PAUSE)

    def tell_places(self, placed: Callable[[object], None]) -> None:
        """Call ``placed`` with what ranks know of the job's nodes, and have said already."""
        with self._lock:
            self._placed, nodes = placed, self._nodes
        if nodes is not None:
            placed(nodes)

    def _more(self, ranks: int) -> bool:
        """Have a thread for each of so many ranks, and one that waits for others; False if there
        is no such thread, and none can be started."""
        while True:
            with self._lock:
                self._most_spare = max(self._most_spare, ranks + 1)
                if (self._spare and self._threads > ranks) or self._threads >= MOST:
                    return True
                self._threads += 1
                self._spare += 1
            try:
                threading.Thread(target=self._run, name="data-rank", daemon=True).start()
            except RuntimeError:  # too many: tried again with the next message
                with self._lock:
                    self._threads -= 1
                    self._spare -= 1
                    return self._spare > 0

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(PAUSE)
                continue
            with self._lock:
                self._spare -= 1
            try:
                if json_lines.ours(json_lines.peer(sock)[1]):
                    self._serve(wire.LineSocket(sock))
            except OSError:
                pass  # it has gone
            except Exception:  # noqa: BLE001 - the thread is there for whoever comes next
                traceback.print_exc()
            sock.close()
            with self._lock:
                if self._spare >= self._most_spare:
                    self._threads -= 1
                    return
                self._spare += 1

    def wait_told(self) -> None:
        """Return when no connected rank has to be told any more, or after 5 LINGER."""
        until = time.monotonic() + 5 * LINGER
        time.sleep(LINGER)
        while time.monotonic() < until and self._lines:
            time.sleep(0.05)

    def _serve(self, line: wire.LineSocket) -> None:
        with self._lock:
            self._lines.add(line)
        try:
            self._listen(line)
        except OSError:
            pass  # it has gone
        finally:
            line.close()
            with self._lock:
                self._lines.discard(line)

    def _listen(self, line: wire.LineSocket) -> None:
        shares: tuple[int, ...] = ()
        at = wanted_after(None)
        while (got := line.receive(None)) is not None:
            message, fds = got
            for fd in fds:  # nobody has asked for any
                os.close(fd)
            if message["op"] == "hello":
                self._run_beside(message.get("cpus"))
                with self._lock:
                    self._nodes, placed = message.get("nodes"), self._placed
                if placed is not None:
                    placed(self._nodes)
                at = wanted_after(message.get("state"))
                if message.get("later"):
                    self._producer.expect(at)
                self._more(min(_whole(message, "beside"), MOST))
                shares = self._welcome(line, message)
            elif message["op"] == "seek":
                at = wanted_after(message.get("state"))
            elif message["op"] == "identity" and shares:
                line.send({"op": "identity", "plan": self._producer.identity()})
            elif message["op"] == "ping":  # from robust-task, which need not be told of an end
                with self._lock:
                    self._lines.discard(line)
                line.send({"op": "pong"})
            elif message["op"] in ("next", "take") and shares:
                step = self._next if message["op"] == "next" else self._take
                at = step(line, at._replace(shares=shares), message)
            else:
                raise wire.Closed("not understood")
            self._more(1)

    def _welcome(self, line: wire.LineSocket, message: dict[str, Any]) -> tuple[int, ...]:
        rank, world, original, beside = (
            _whole(message, name) for name in ("rank", "world", "original", "beside")
        )
        say = lambda: line.send({"op": "wait"})  # noqa: E731
        got = self._producer.shares(rank, world, original, beside, say)
        if got is None or isinstance(got, StepFailure):
            _fail(line, got)
            return ()
        line.send({"op": "welcome", "shares": got})
        return got

    def _next(self, line: wire.LineSocket, wanted: Wanted, message: dict[str, Any]) -> Wanted:
        """Answer with the step, once it is made, and further ones that are; return the one after
        the last of them."""
        most = _whole({"more": 0, **message}, "more")  # not said by ranks of an older version
        got = self._producer.get(wanted, lambda: line.send({"op": "wait"}))
        if got is None or isinstance(got, StepFailure):
            _fail(line, got)
            return wanted
        more = self._producer.made(got[0].after, wanted.shares, most)
        return _send_steps(line, wanted, [got, *more])

    def _take(self, line: wire.LineSocket, wanted: Wanted, message: dict[str, Any]) -> Wanted:
        """Note which step the rank takes of those that it has in hand, and answer at once with
        further ones that are made."""
        self._producer.take(str(message.get("name")))
        made = self._producer.made(wanted.name, wanted.shares, _whole(message, "more"))
        return _send_steps(line, wanted, made)

    def _run_beside(self, cpus: object) -> None:
        """Use the processors of all ranks here, not just those of the one that was bound first."""
        if isinstance(cpus, list) and all(type(cpu) is int and 0 <= cpu < 1 << 16 for cpu in cpus):
            with self._lock:
                if self._cpus.issuperset(cpus):
                    return
                self._cpus.update(cpus)
                wanted = set(self._cpus)
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):
                    os.sched_setaffinity(int(thread.name), wanted)


def _send_steps(
    line: wire.LineSocket, wanted: Wanted, steps: list[tuple[MadeStep, list[int]]]
) -> Wanted:
    """Send steps, and close the descriptors; return the one after the last that was sent."""
    at = wanted
    left = len(steps)
    try:
        for made, fds in steps:
            left -= 1
            pages = [[share, made.pages[share].head()] for share in wanted.shares]
            step = {"op": "step", "name": made.before, "number": made.number, "left": left}
            line.send({**step, "pages": pages}, fds, state=made.state)
            at = Wanted(made.after, made.state, wanted.shares, made.number + 1)
        if not steps:
            line.send({"op": "none"})
    except OSError as err:
        if err.errno != errno.ETOOMANYREFS or at == wanted:
            raise
        line.send({"op": "none"})  # of that one nothing was sent: it is not needed yet
    finally:
        for _, fds in steps:
            for fd in fds:
                os.close(fd)
    return at


def _fail(line: wire.LineSocket, failure: StepFailure | None) -> None:
    if failure is None:
        raise wire.Closed("it ends")
    line.send({"op": "failed", "kind": failure.kind, "why": failure.why})


def _whole(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if type(value) is not int or not 0 <= value < 1 << 30:
        raise wire.Closed("not understood")
    return value
