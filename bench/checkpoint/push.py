"""A rank without torch that has snapshots pushed to the peer, as fast as the Store can."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

from bench.common import BenchError
from robust_slurm.checkpoint.format.layout import Entry, Snapshot, encode_header, lay_out

SLOTS = 3
DEADLINE = 120.0


class Pusher:
    """Rank 0 of one, with ``SLOTS`` slots of about ``nbytes`` each."""

    def __init__(self, path: str, nbytes: int, epoch: int) -> None:
        self._nbytes, self._epoch, self._step = nbytes, epoch, 0
        self._link = socket.socket(socket.AF_UNIX)
        self._link.settimeout(DEADLINE)
        self._link.connect(path)
        self._lines = self._link.makefile("rb")
        self._say(
            op="enrol", rank=0, world=1, local=0, epoch=epoch, pid=0, mesh={}, needs=[0],
            directory="", every=0, keep=2, python="", bytes=nbytes,
        )  # fmt: skip
        self._directory = Path(self._hear("welcome")["directory"])

    def push(self) -> tuple[float, float]:
        """Seconds from "the snapshot is complete" until it is digested, and replicated."""
        self._step += 1
        slot = self._step % SLOTS
        name = f"own-0-{slot}.safetensors"
        self._write(self._directory / name)
        began = time.perf_counter()
        self._say(
            op="saved", step=self._step, slot=slot, file=name, copy_s=0.0, blocked_s=0.0,
            persist=False,
        )  # fmt: skip
        self._hear("kept")
        kept = time.perf_counter() - began
        self._hear("replicated")
        return kept, time.perf_counter() - began

    def close(self) -> None:
        self._link.close()

    def _write(self, path: Path) -> None:
        """A snapshot of one large tensor; the data stays what it was but for its beginning."""
        shape = (self._nbytes // 4,)
        entry = Entry("model.weight", "F32", shape, "model.weight", shape, (0,), "private")
        about = Snapshot(self._step, 0, 1, self._epoch, "bench", {}, (0,), {}, (entry,))
        header = encode_header(about)
        plan = lay_out([entry], len(header))
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.write(bytes(8))
            if file.seek(0, 2) != plan.size:
                file.truncate(0)
                file.seek(8 + plan.header_size)
                block = bytes(range(256)) * 4096
                for at in range(0, entry.nbytes, len(block)):
                    file.write(block[: entry.nbytes - at])
            file.seek(8 + plan.header_size)
            file.write(self._step.to_bytes(8, "little"))
            file.seek(8)
            file.write(header.ljust(plan.header_size))
            file.seek(0)
            file.write(plan.header_size.to_bytes(8, "little"))
        path.chmod(0o600)

    def _say(self, **message: Any) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def _hear(self, op: str) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = json.loads(self._lines.readline() or b'{"op": "gone"}')
            if message["op"] == op:
                return message
            if message["op"] in ("refused", "unkept", "gone", "alone"):
                raise BenchError(f"the store answers {message} where {op} was expected")
