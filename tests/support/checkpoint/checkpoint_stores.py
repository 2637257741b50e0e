"""Stores, ranks and snapshot files for the tests of the store."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import until

from robust_slurm.checkpoint.format.layout import Entry, Snapshot, encode_header, lay_out
from robust_slurm.checkpoint.store.events import StoreEvent, Target
from robust_slurm.checkpoint.store.store import Store

KEY = b"k" * 32
SIZE = 3_000_000


def write_snapshot(
    path: Path,
    rank: int,
    step: int,
    *,
    size: int = SIZE,
    epoch: int = 0,
    world: int = 4,
    frozen: bytes = b"",
    line: int = 0,
) -> bytes:
    """Write a snapshot like a rank: torn first, the header's length last. Returns the content.

    ``frozen``: the end of the data; ``line``: see ``Snapshot.line``."""
    entry = Entry("t", "U8", (size,), "t", (size,), (0,), "private")
    about = Snapshot(
        step, rank, world, epoch, "job7", {}, (rank,), {"step": step}, (entry,), line=line
    )
    header = encode_header(about)
    plan = lay_out([entry], len(header))
    block = bytes((step * 7 + rank * 3 + line + i * i) % 251 for i in range(4096))
    data = (block * (size // len(block) + 1))[: size - len(frozen)] + frozen
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    with open(fd, "r+b", buffering=0) as file:
        file.write(bytes(8))
        file.truncate(plan.size)
        file.write(header.ljust(plan.header_size))
        file.seek(plan.offsets[0])
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
        file.write(plan.header_size.to_bytes(8, "little"))
    return path.read_bytes()


class FakeRank:
    """Speaks the rank's side of the protocol over a real socket."""

    def __init__(self, store: Store, rank: int, *, epoch: int = 0, world: int = 4, **more: Any):
        self.rank, self.epoch, self.world = rank, epoch, world
        self.line = 0
        self.messages: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self.directory = store.socket_path.parent
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect(str(store.socket_path))
        threading.Thread(target=self._listen, daemon=True).start()
        enrol = {"op": "enrol", "rank": rank, "world": world, "local": 0, "epoch": epoch, "pid": 1,
                 "mesh": {}, "needs": [rank], "bytes": SIZE}  # fmt: skip
        self.say(**{**enrol, **more})

    def say(self, **message: Any) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def raw(self, data: bytes) -> None:
        self._sock.sendall(data)

    def _listen(self) -> None:
        try:
            with self._sock.makefile("rb") as lines:
                for line in lines:
                    self.messages.append(json.loads(line))
        except OSError:
            pass  # the store did not read all before it closed
        finally:
            self.ended.set()

    def heard(self, op: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            m for m in list(self.messages)
            if m["op"] == op and all(m.get(k) == v for k, v in fields.items())
        ]  # fmt: skip

    def wait(self, op: str, **fields: Any) -> dict[str, Any]:
        until(lambda: self.heard(op, **fields), f"{op} {fields}, heard {self.messages}", 30)
        return self.heard(op, **fields)[-1]

    def save(
        self,
        step: int,
        *,
        slot: int | None = None,
        size: int = SIZE,
        frozen: bytes = b"",
        **more: Any,
    ) -> bytes:
        slot = step % 3 if slot is None else slot
        name = f"own-{self.rank}-{slot}.safetensors"
        data = write_snapshot(
            self.directory / name, self.rank, step, size=size, epoch=self.epoch, frozen=frozen,
            world=self.world, line=self.line,
        )  # fmt: skip
        self.say(op="saved", step=step, slot=slot, file=name, copy_s=0.1, blocked_s=0.01, **more)
        return data

    def begin(self, step: int, line: int = 0) -> None:
        """Resume this step like a rank: its later snapshots are made invalid first."""
        for own in self.wait("welcome")["own"]:
            if own["step"] > step:
                path = self.directory / f"own-{self.rank}-{own['slot']}.safetensors"
                with path.open("r+b") as file:
                    file.write(bytes(8))
        self.line = line
        self.say(op="began", step=step, line=line)

    def die(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Events(list[StoreEvent]):
    def of(self, kind: type) -> list[Any]:
        return [event for event in list(self) if isinstance(event, kind)]

    def wait(self, kind: type, condition: Callable[[Any], bool] = lambda _e: True) -> Any:
        until(lambda: any(condition(e) for e in self.of(kind)), f"{kind.__name__} in {self}", 30)
        return next(e for e in self.of(kind) if condition(e))


@contextmanager
def stores(base: Path, count: int, **options: Any) -> Iterator[list[tuple[Store, Events]]]:
    """Several stores in directories of their own."""
    made: list[tuple[Store, Events]] = []
    try:
        for number in range(count):
            events = Events()
            arguments = {"key": KEY, "patience": 2.0, **options}
            store = Store(base / f"s{number}", name="0", emit=events.append, **arguments)
            made.append((store, events))
        yield made
    finally:
        for store, _ in made:
            store.close()


def replicas(store: Store, *, ok: bool = True) -> list[tuple[int, int]]:
    """Owner and step of the replicas in stock."""
    return sorted((h.owner, h.step) for h in store.stock() if h.tier == "replica" and h.ok is ok)


def target(store: Store, rank: int = 1) -> Target:
    return Target(rank, "127.0.0.1", store.port, "peer")


def at_port(port: int) -> Target:
    """A peer that is reached by way of a Proxy."""
    return Target(1, "127.0.0.1", port, "peer")


class Proxy:
    """Passes TCP on to a store until it has had ``budget`` bytes; then it cuts or stalls.

    ``each``: every connection begins with the whole budget.
    """

    def __init__(self, port: int, budget: int, *, cut: bool = True, each: bool = False) -> None:
        self.budget = self._first = budget
        self.each = each
        self.passed = 0
        """Bytes, both ways."""
        self.cut = cut
        self.connections = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.each:
                self.budget = self._first
            server = socket.create_connection(("127.0.0.1", self._to))
            self._open += [client, server]
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with_data = True
        while with_data:
            try:
                data = source.recv(1 << 16)
                self.budget -= len(data)
                if self.budget < 0:
                    if self.cut:
                        break
                    threading.Event().wait(60)
                sink.sendall(data)
                self.passed += len(data)
                with_data = bool(data)
            except OSError:
                break
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            sock.close()


def refill(proxy: Proxy) -> None:
    """Let everything through once the budget is used up."""
    until(lambda: proxy.budget < 0, "cut")
    proxy.budget = 1 << 40


def flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
