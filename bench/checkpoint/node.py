"""A node of bench.checkpoint: a network namespace with the Store that robust-task runs there.

``python -m bench.checkpoint.node`` does what the JSON lines on its stdin say and answers each with
one on stdout. The Store is the real one, in a process of its own, without torch; what is not there
is the rest of robust-task (its ranks, its line to the supervisor), which is idle between faults.
The same process sends and receives plain TCP for comparison.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lab import linux
from robust_slurm.checkpoint.store.events import (
    AlarmEvent,
    Restore,
    SavedEvent,
    StoreEvent,
    Target,
    WantedSnapshot,
)
from robust_slurm.checkpoint.store.store import Store

KEY = b"bench.checkpoint bench.checkpoint"[:32]
INTERFACE = "eth0"
RECEIVE = 1 << 20  # bytes of the plain receiver's one buffer, as iperf has
DEADLINE = 120.0


class Node:
    """The object that the commands act on."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self.events: list[str] = []
        self._saved: list[SavedEvent] = []
        self._blob = b""

    @property
    def store(self) -> Store:
        if self._store is None:
            raise RuntimeError("no store was started on this node")
        return self._store

    def address(self, address: str) -> dict[str, Any]:
        """Take the interface up that was put into this namespace."""
        linux.set_link("lo", True)
        linux.set_address(INTERFACE, address, "255.255.255.0")
        linux.set_link(INTERFACE, True)
        return {}

    def start(self, directory: str, name: str, bandwidth: float = 0.0) -> dict[str, Any]:
        """``bandwidth``: bytes/s for each owner's replica, 0 for no limit."""
        self._store = Store(
            Path(directory), name=name, key=KEY, emit=self._emit, bandwidth=bandwidth
        )
        return {"socket": str(self.store.socket_path), "port": self.store.port}

    def _emit(self, event: StoreEvent) -> None:
        if isinstance(event, AlarmEvent):
            self.events.append(repr(event))
        if isinstance(event, SavedEvent):
            self._saved.append(event)

    def costs(self) -> dict[str, Any]:
        """Costs of the snapshots reported since the last call: rank, step, cost."""
        taken, self._saved = self._saved, []
        return {"costs": [(each.rank, each.step, each.cost) for each in taken]}

    def save_every(self, every: int, first: int) -> dict[str, Any]:
        self.store.orders.save_every(every, first)
        return {}

    def place(self, rank: int, host: str, port: int) -> dict[str, Any]:
        """Replicas of ``rank`` go there; port 0: it is alone."""
        self.store.place({rank: Target(rank, host, port, host) if port else None})
        return {}

    def begin(
        self, epoch: int, step: int = 0, shards: dict[str, str] | None = None
    ) -> dict[str, Any]:
        named = {int(rank): file for rank, file in (shards or {}).items()}
        self.store.begin(epoch, Restore(step, "memory", named) if named else None)
        return {}

    def stock(self) -> dict[str, Any]:
        began = time.perf_counter()
        holdings = self.store.stock()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "holdings": [one._asdict() for one in holdings]}

    def fetch(self, owner: int, step: int, host: str, port: int) -> dict[str, Any]:
        began = time.perf_counter()
        (outcome,) = self.store.fetch([WantedSnapshot(owner, step, host, port)])
        return {**outcome._asdict(), "seconds": time.perf_counter() - began}

    def make_room(self, size: int) -> dict[str, Any]:
        """Make room as a node without ranks does, and return when the room is there."""
        self.store.room.prepare(size, 1)
        give_up_at = time.monotonic() + DEADLINE
        while self.store.room.sizes != [size]:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"no room for {size} bytes within {DEADLINE:g} s")
            time.sleep(0.01)
        return {}

    def cpu(self) -> dict[str, Any]:
        """Processor seconds that this node has taken so far, all its threads together."""
        return {"seconds": time.process_time()}

    def alarms(self) -> dict[str, Any]:
        return {"alarms": self.events}

    def raw_listen(self, nbytes: int) -> dict[str, Any]:
        """Send ``nbytes`` from memory to whoever connects, one after another."""
        blob = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE)
        blob.write(bytes(range(1, 256)) * (nbytes // 255))
        listener = socket.create_server(("0.0.0.0", 0))
        threading.Thread(target=_serve, args=(listener, memoryview(blob)), daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def raw_receive(self, nbytes: int, host: str, port: int, keep: bool) -> dict[str, Any]:
        """Seconds from the connection to the last byte. ``keep``: into new memory, as whoever
        needs the data must; else into one buffer again and again, as iperf."""
        buffer = memoryview(bytearray(RECEIVE))
        began = time.perf_counter()
        left = nbytes
        memory = memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE)) if keep else None
        with socket.create_connection((host, port), DEADLINE) as link:
            while left > 0:
                at = nbytes - left
                got = link.recv_into(buffer if memory is None else memory[at : at + RECEIVE])
                left -= got
                if not got:
                    break
        if left > 0:
            raise OSError(f"{left} of {nbytes} bytes did not come")
        return {"seconds": time.perf_counter() - began}

    def stop(self) -> dict[str, Any]:
        if self._store is not None:
            self._store.close()
        return {}


def _serve(listener: socket.socket, blob: memoryview) -> None:
    while True:
        link, _ = listener.accept()
        with link:
            link.settimeout(DEADLINE)
            link.sendall(blob)


def main() -> None:
    linux.unshare(linux.CLONE_NEWNET)
    node = Node()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(node, order.pop("op"))(**order)
        except Exception as error:  # noqa: BLE001 - the other side must know what went wrong here
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
