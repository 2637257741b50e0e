"""The socket on which the ranks of a node ask for its data process.

A rank keeps its connection open as long as it wants the process. A process that no rank wants is
kept for the next ranks; it is ended if those want another one (other code, another plan).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from robust_slurm.data.exchange.placement import LEAST
from robust_slurm.frames.json_lines import encode, ours, peer
from robust_slurm.text import one_line
from srun_wrapper.agent.data.data_process import AskedData, DataProcess
from srun_wrapper.agent.data.news import DataNews, figures
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.data_messages import DataReport

NAME = "data.sock"
"""In the agent's run directory, where ``data/service/client.py`` looks for it."""
MOST = 4 << 20  # bytes of a request
CONNECTIONS = 1024
_NAMESPACES = ("mnt", "pid", "user")
_log = logging.getLogger("robust-task")


class DataDoor:
    """All methods are called in the loop's thread."""

    def __init__(self, loop: Loop, run_dir: Path, key: bytes, nodes: int = LEAST) -> None:
        """``key``: of the step; ``nodes``: with fewer than LEAST, no port is opened for others."""
        self._loop = loop
        self._run_dir = run_dir
        self._processes: dict[str, DataProcess] = {}
        self._open: dict[socket.socket, tuple[bytearray, DataProcess | None]] = {}
        self._deaths = 0  # of processes that are not kept any more
        self.news = DataNews(self._report)
        self._listener: socket.socket | None = None
        self._exchange: socket.socket | None = None
        self._key = hashlib.blake2b(b"data", key=key[:64], digest_size=32).hexdigest()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(run_dir / NAME))
            (run_dir / NAME).chmod(0o600)
            listener.listen(CONNECTIONS)
            listener.setblocking(False)
        except OSError as err:
            listener.close()
            _log.warning(f"no data process on this node: {run_dir / NAME}: {err}")
            return
        self._listener = listener
        loop.watch(listener, self._accept, write=False)
        if nodes < LEAST:
            return
        try:
            self._exchange = _for_nodes()
        except OSError as err:
            _log.warning(f"no other node can read data here: {err}")

    @property
    def port(self) -> int:
        """Port on which other nodes' data processes reach this node's; 0: they cannot."""
        return self._exchange.getsockname()[1] if self._exchange is not None else 0

    def _report(self) -> DataReport | None:
        """Return what is known of the process that most ranks want; None if none was ever kept."""
        processes = sorted(self._processes.values(), key=lambda process: process.wanted)
        if not processes:
            return None
        deaths = self._deaths + sum(process.deaths for process in processes)
        last = processes[-1]
        return DataReport(deaths, one_line(last.off, 300), figures(last.figures))

    def _accept(self, _mask: int) -> None:
        assert self._listener is not None
        sock = self._loop.accept(self._listener)
        if sock is None:
            return
        if len(self._open) >= CONNECTIONS or not ours(peer(sock)[1]):
            sock.close()
            return
        sock.setblocking(False)
        self._open[sock] = bytearray(), None
        self._loop.watch(sock, lambda _mask: self._readable(sock), write=False)

    def _readable(self, sock: socket.socket) -> None:
        data, process = self._open[sock]
        try:
            got = sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        data += got
        if not got or len(data) > MOST:
            self._close(sock)
        elif data.endswith(b"\n"):  # one request at a time: an answer is awaited
            self._open[sock] = bytearray(), self._ask(sock, bytes(data), process)

    def _ask(
        self, sock: socket.socket, line: bytes, before: DataProcess | None
    ) -> DataProcess | None:
        """Answer; return the process that this connection now wants."""
        if before is not None:
            before.wanted -= 1
        try:
            asked = msgspec.json.decode(line, type=AskedData)
            why = _elsewhere(peer(sock)[0])
            process = None if why else self._process(asked)
        except (ValueError, RecursionError, OSError) as err:
            why, process = str(err), None
        if process is not None:
            process.wanted += 1
            process.run()
            why = process.off
        answer: dict[str, object] = {"op": "refused", "why": why} if why else {"op": "here"}
        if process is not None:
            answer |= {"path": str(process.path), "served": process.serves}
        with contextlib.suppress(OSError):  # it has gone
            sock.send(encode(answer))
        return process

    def _process(self, asked: AskedData) -> DataProcess:
        """Return the data process for this plan; start it if there is none. Raises OSError."""
        key = asked.key()
        if key not in self._processes:
            for other, process in list(self._processes.items()):
                if not process.wanted:
                    process.stop()
                    self._deaths += process.deaths
                    del self._processes[other]
            exchange = None  # one process may accept there
            if self._exchange is not None and not self._processes:
                exchange = self._exchange, self._key
            self._processes[key] = DataProcess(self._loop, asked, self._run_dir / key, exchange)
        return self._processes[key]

    def _close(self, sock: socket.socket) -> None:
        _, process = self._open.pop(sock)
        if process is not None:
            process.wanted -= 1
        self._loop.forget(sock)
        sock.close()

    def close(self) -> None:
        """The shim ends: no data process stays."""
        for sock in list(self._open):
            self._close(sock)
        for process in self._processes.values():
            process.stop()
        self._processes.clear()
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.forget(listener)
            listener.close()
        if self._exchange is not None:
            self._exchange.close()


def _for_nodes() -> socket.socket:
    """Listen on all addresses. The data process that is to accept there may be away for a while."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    dual = family == socket.AF_INET6
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=1024)


def _elsewhere(pid: int, proc: Callable[[int], Path] = lambda pid: Path(f"/proc/{pid}")) -> str:
    """Return why a process started here would not see what rank ``pid`` sees; "" if it does."""
    try:
        for name in _NAMESPACES:
            if (proc(pid) / "ns" / name).readlink() != (proc(os.getpid()) / "ns" / name).readlink():
                return f"the rank is in a container of its own ({name} namespace)"
        theirs, own = (proc(pid) / "root").stat(), (proc(os.getpid()) / "root").stat()
    except OSError:
        return "the rank is in a container of its own"
    same = (theirs.st_dev, theirs.st_ino) == (own.st_dev, own.st_ino)
    return "" if same else "the rank is in a container of its own"
