"""A Store in a process of its own, as in robust-task; orders and answers are JSON lines.

Its digest can be made to stop at a chunk until a file appears: a store that is starved of its
cores, deterministically.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.planning.interval import Cost
from robust_slurm.checkpoint.store.events import SavedEvent, StoreEvent, Target
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.checkpoint.transfer.throttle import Bucket

CHUNK = 1 << 18  # bytes; small, so that small snapshots have several
KEY = b"k" * 32


class StoreProcess:
    """The other end of it."""

    def __init__(self, directory: Path, *, stall_at: int = -1, **options: Any) -> None:
        """``stall_at``: the first digest stops before this chunk until ``go()``."""
        self.directory = directory
        self._go = directory.with_suffix(".go")
        self.stalled = directory.with_suffix(".stalled")
        """A file that exists once the digest has stopped."""
        config = {"directory": str(directory), "stall_at": stall_at, "options": options}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.checkpoint.store_process", json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).resolve().parents[3],
        )  # fmt: skip
        about = self._answer()
        self.socket, self.port = Path(about["socket"]), int(about["port"])

    def place(self, owner: int, at: StoreProcess) -> None:
        self._ask("place", owner=owner, port=at.port)

    def stock(self) -> list[dict[str, Any]]:
        """Return the store's holdings, every byte held against the digests."""
        return list(self._ask("stock"))

    def save_every(self, every: int, first: int) -> None:
        self._ask("save_every", every=every, first=first)

    def costs(self) -> list[tuple[int, Cost]]:
        """Return step and cost of every SavedEvent so far."""
        return [(step, Cost(*cost)) for step, cost in self._ask("costs")]

    def open_link(self) -> None:
        """Let ``bandwidth`` limit nothing from now on."""
        self._ask("open_link")

    def alarms(self) -> list[str]:
        return list(self._ask("alarms"))

    def go(self) -> None:
        self._go.touch()

    def close(self) -> None:
        assert self._process.stdin is not None
        self.go()
        try:
            self._process.stdin.close()
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait(10)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _ask(self, op: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def _stall(directory: Path, at: int) -> None:
    real, once = digest.chunk_crc, threading.Lock()

    def slow(fd: int, index: int, *rest: Any) -> int:
        if index == at and once.acquire(blocking=False):
            directory.with_suffix(".stalled").touch()
            while not directory.with_suffix(".go").exists():
                threading.Event().wait(0.01)
        return real(fd, index, *rest)

    digest.chunk_crc = slow


def _main(config: dict[str, Any]) -> None:
    directory = Path(config["directory"])
    digest.CHUNK = CHUNK
    digest.workers = lambda _most: 1
    _stall(directory, config["stall_at"])
    events: list[StoreEvent] = []
    store = Store(directory, name="0", key=KEY, emit=events.append, **config["options"])
    print(json.dumps({"socket": str(store.socket_path), "port": store.port}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any = None
        if order["op"] == "place":
            store.place({order["owner"]: Target(1, "127.0.0.1", order["port"], "peer")})
        elif order["op"] == "stock":
            answer = [held._asdict() for held in store.stock()]
        elif order["op"] == "save_every":
            store.orders.save_every(order["every"], order["first"])
        elif order["op"] == "open_link":
            Bucket.take = lambda *_: 0.0  # type: ignore[method-assign]
        elif order["op"] == "costs":
            answer = [(event.step, event.cost) for event in events if isinstance(event, SavedEvent)]
        elif order["op"] == "alarms":
            answer = [event.text for event in events if hasattr(event, "text")]
        print(json.dumps(answer), flush=True)
    store.close()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
