"""The socket on which a slot's launcher (torchrun) requests ranks, with a warm interpreter each.

The launcher's side is ``robust_slurm.auto.launched``. What it may ask for is what its ranks were
before: the same command line, on the slot's own node, as the same user.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from robust_slurm.frames.json_lines import peer
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.surroundings import environ_of, parent_of, same_surroundings
from srun_wrapper.agent.warm.commands import at_start
from srun_wrapper.agent.warm.imports import LOOK, Learnt, read_learnt
from srun_wrapper.agent.warm.interpreter import Warm

_HEAD = 8
_MOST = 4 << 20  # bytes of a request
_MANY = 256  # ranks of one launcher


Tell = Callable[[Learnt, int, dict[str, str]], None]
"""Gets what a rank has told; see ``messages.Imports``."""


class _Request(msgspec.Struct):
    words: list[str]
    environ: dict[str, str]
    directory: str
    thread: int = 0


@dataclass(slots=True)
class _Asking:
    """One connection: a rank that is asked for, runs, or has ended."""

    sock: socket.socket
    data: bytearray = field(default_factory=bytearray)
    fds: list[int] = field(default_factory=list)
    asked: bool = False
    pid: int = 0


class TorchrunBroker:
    """All methods are called in the loop's thread."""

    def __init__(
        self, loop: Loop, path: Path, imports: Path, make: Callable[[], Warm], tell: Tell
    ) -> None:
        """``imports``: the file in which a launcher that requests ranks lists its own imports.
        ``make``: returns a holder for one warm interpreter. Raises OSError."""
        self._loop = loop
        self._make = make
        self._tell = tell
        self.path = path
        self.imports = imports
        self._warm: dict[str, Warm] = {}  # by LOCAL_RANK
        self._asking: dict[socket.socket, _Asking] = {}
        self._unclaimed: dict[int, int] = {}
        self._watching = 0
        self._stopping = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(_MANY)
        self._listener.setblocking(False)
        loop.watch(self._listener, self._accept, write=False)

    # -- getting them ready

    def watch(self, directory: Path, epoch: int, launcher: int) -> None:
        """Watch for the imports that the ranks of ``launcher`` (its pid) record one by one."""
        self._watching += 1
        self._stopping = False
        turn, seen = self._watching, set[Path]()

        def poll() -> None:
            if turn != self._watching:
                return
            for path in set(directory.glob(f"{epoch}-*.modules")) - seen:
                learnt = read_learnt(path)
                if learnt is not None:
                    seen.add(path)
                    self._get_ready(learnt, launcher)
            self._loop.later(LOOK, poll)

        self._loop.later(LOOK, poll)

    def _get_ready(self, learnt: Learnt, launcher: int) -> None:
        # The directory is the whole node's: other slots' ranks tell there too.
        ours = any(asking.pid == learnt.pid for asking in self._asking.values())
        ours = ours or self._would_ask(parent_of(learnt.pid), launcher)
        environ = environ_of(learnt.pid) if ours else {}
        local = environ.get("LOCAL_RANK", "")
        if not local or len(self._warm) >= _MANY:
            return
        if not Path(learnt.words[0]).name.startswith("python"):
            return
        if not same_surroundings(parent_of(learnt.pid), 0, os.getpid()):
            return  # a container, limits or processors of the launcher's own
        if local == "0" and (ranks := _ranks(environ)):
            self._tell(learnt, ranks, at_start(environ))
        self._place(local).start(learnt, learnt.words, environ)

    def _would_ask(self, parent: int, launcher: int) -> bool:
        """True if ``parent`` is a launcher that requests its ranks here, not just any script."""
        told = read_learnt(self.imports)
        if told is None or told.pid != parent:
            return False
        return parent == launcher or parent in process_tree.descendants(launcher)

    def _place(self, local: str) -> Warm:
        if local not in self._warm:
            self._warm[local] = self._make()
        return self._warm[local]

    def warm_up(self, learnt: Learnt, ranks: int, environ: Mapping[str, str]) -> None:
        """Get ready for ranks as on another node, before a launcher runs here."""
        learnt = msgspec.structs.replace(learnt, standby=False)  # nobody goes further than imports
        for local in map(str, range(min(ranks, _MANY))):
            own = {**environ, "LOCAL_RANK": local}
            self._place(local).start(learnt, learnt.words, own, further=True)

    def unwatch(self) -> None:
        """Note that the launcher has ended; end interpreters of which it never requested a rank."""
        self._watching += 1
        for warm in self._warm.values():
            if warm.early:
                warm.stop()

    # -- being asked

    def _accept(self, _mask: int) -> None:
        sock = self._loop.accept(self._listener)
        if sock is not None:
            sock.setblocking(False)
            asking = self._asking[sock] = _Asking(sock)
            self._loop.watch(sock, lambda _mask: self._readable(asking), write=False)

    def _readable(self, asking: _Asking) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(asking.sock, 1 << 16, 4)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        asking.fds += fds
        if not data or len(asking.data) > _MOST:
            self._close(asking)
            return
        asking.data += data
        size = int.from_bytes(asking.data[:_HEAD], "big")
        if not asking.asked and len(asking.data) >= _HEAD + size:
            asking.asked = True
            self._ask(asking, bytes(asking.data[_HEAD:]))

    def _ask(self, asking: _Asking, body: bytes) -> None:
        def answer(pid: int) -> None:
            if pid and asking.sock not in self._asking and pid not in self._unclaimed:
                process_tree.send([pid], signal.SIGKILL)  # the launcher that asked for it has gone
            asking.pid = pid
            self._say(asking, pid)
            if not pid:
                self._close(asking)
            elif pid in self._unclaimed:
                self._ended(asking, self._unclaimed[pid])
            self._forget_unclaimed()

        try:
            request = msgspec.json.decode(body, type=_Request)
        except (ValueError, RecursionError):  # no UTF-8, or nested too deep
            self._close(asking)
            return
        words, environ = request.words, request.environ
        warm = self._warm.get(environ.get("LOCAL_RANK", ""))
        self._end_surplus(_ranks(environ))
        asked = (
            warm is not None
            and not self._stopping
            and len(asking.fds) == 2
            and warm.fits(words, environ, request.directory)
            and same_surroundings(peer(asking.sock)[0], request.thread, os.getpid())
            and warm.ask(words, environ, asking.fds, answer, request.directory)
        )
        for fd in asking.fds:
            os.close(fd)
        asking.fds.clear()
        if not asked:
            if warm is not None:
                warm.late()
            answer(0)

    def _end_surplus(self, ranks: int) -> None:
        """End the surplus: fewer ranks are here than on the node that has reported its own."""
        for local, warm in self._warm.items():
            if warm.early and ranks and int(local) >= ranks:
                warm.stop()

    def _forget_unclaimed(self) -> None:
        if not any(a.asked and not a.pid for a in self._asking.values()):
            self._unclaimed.clear()

    def _say(self, asking: _Asking, number: int) -> None:
        with contextlib.suppress(OSError):
            asking.sock.send(f"{number}\n".encode())

    def _ended(self, asking: _Asking, status: int) -> None:
        self._say(asking, status)
        self._close(asking)

    def _close(self, asking: _Asking) -> None:
        if self._asking.pop(asking.sock, None) is None:
            return
        self._loop.forget(asking.sock)
        asking.sock.close()
        for fd in asking.fds:
            os.close(fd)
        asking.fds.clear()

    # -- ends

    def reaped(self, ended: Mapping[int, int]) -> None:
        """Children of the shim that have ended: pid → wait status."""
        for warm in self._warm.values():
            warm.reaped(ended)
        self._unclaimed |= ended
        for asking in list(self._asking.values()):
            if asking.pid in ended:
                self._ended(asking, ended[asking.pid])
        self._forget_unclaimed()

    def ready(self) -> int:
        """Number of ranks that could be forked now."""
        return sum(warm.ready for warm in self._warm.values())

    def processes(self) -> list[int]:
        """Pids that must not be ended with the ranks."""
        return [pid for warm in self._warm.values() for pid in warm.processes()]

    def cancel(self) -> None:
        """Cancel all requests: all ranks are being ended, running ones first by their launcher if
        it has time. No rank may be left over from a fork in progress, and none may be added."""
        self._stopping = True
        for asking in list(self._asking.values()):
            if not asking.pid:
                self._close(asking)
        for warm in self._warm.values():
            warm.cancel()

    def stop(self) -> None:
        for warm in self._warm.values():
            warm.stop()
        for asking in list(self._asking.values()):
            self._close(asking)
        self._loop.forget(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            self.path.unlink()


def _ranks(environ: Mapping[str, str]) -> int:
    """Number of ranks of a launcher on this node, as it tells each of them; 0: unknown."""
    size = environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(size), _MANY) if size.isascii() and size.isdecimal() else 0
