"""Two nodes of bench.checkpoint with a cable between them, and what may be asked of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.checkpoint.node import INTERFACE
from bench.common import REPOSITORY, BenchError

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEADLINE = 300.0
LIMIT = 1800.0
SHM = "/dev/shm"


class Remote:
    """The process that is one node; methods of ``node.Node`` by name."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.checkpoint.node"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = int(self._answer()["pid"])

    def ask(self, op: str, **more: Any) -> dict[str, Any]:
        """Carry out one order. BenchError says why it could not be."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **more}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise BenchError(f"bench.checkpoint.node, {op}: {answer['error']}")
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], DEADLINE)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise BenchError("bench.checkpoint.node ended or hangs; its stderr says why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        """End the process; with it go its network namespace and the cable."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def run_json(
    argv: Sequence[str], env: dict[str, str], killed: bool = False, limit: float = LIMIT
) -> dict[str, Any]:
    """The JSON object that a process of the bench prints last, within ``limit`` s."""
    done = subprocess.run(
        argv,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=limit,
    )
    if done.returncode != (-9 if killed else 0) or not done.stdout:
        text = done.stderr.strip()[-1500:]
        raise BenchError(f"{' '.join(argv[1:])} ended with {done.returncode}: {text}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory, gone afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="bench-ckpt-", dir=SHM))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Nodes:
    """Two nodes, a Store in each: ``with Nodes() as nodes``. Needs root."""

    def __init__(self, bandwidth: float = 0.0) -> None:
        """``bandwidth``: bytes/s for each rank's replica, 0 for no limit."""
        self._bandwidth = bandwidth
        self.remotes: list[Remote] = []
        self.sockets: list[str] = []
        self.ports: list[int] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.directory = self._stack.enter_context(scratch())
        try:
            for _ in ADDRESSES:
                self.remotes.append(Remote())
            one, other = (remote.pid for remote in self.remotes)
            cable = (
                f"link add {INTERFACE} netns {one} type veth peer name {INTERFACE} netns {other}"
            )
            subprocess.run(["ip", *cable.split()], check=True, timeout=10)
            for index, address in enumerate(ADDRESSES):
                remote = self.remotes[index]
                remote.ask("address", address=address)
                started = remote.ask(
                    "start", directory=str(self.path(index)), name="store",
                    bandwidth=self._bandwidth,
                )  # fmt: skip
                self.sockets.append(started["socket"])
                self.ports.append(started["port"])
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for remote in self.remotes if kind is None else ():
                remote.ask("stop")
        finally:
            self._end()

    def _end(self) -> None:
        for remote in self.remotes:
            remote.end()
        self._stack.close()

    def path(self, index: int) -> Path:
        """Return the directory, in memory, of the node's store."""
        return self.directory / f"n{index}"

    def replicate(self, rank: int) -> None:
        """Have the first node's rank keep its replica on the second from now on."""
        self.remotes[0].ask("place", rank=rank, host=ADDRESSES[1], port=self.ports[1])

    def alone(self, rank: int) -> None:
        """The rank's snapshots are not replicated any more; the replica stays."""
        self.remotes[0].ask("place", rank=rank, host="", port=0)

    def begin(self, epoch: int, step: int, file: str) -> None:
        """A new epoch on the first node, from ``file`` of ``step``; "": from nothing."""
        shards = {"0": file} if file else {}
        self.remotes[0].ask("begin", epoch=epoch, step=step, shards=shards)

    def fetch(self, owner: int, step: int) -> dict[str, Any]:
        """The first node gets a snapshot from the second; its Outcome."""
        order = {"owner": owner, "step": step, "host": ADDRESSES[1], "port": self.ports[1]}
        outcome = self.remotes[0].ask("fetch", **order)
        if not outcome["ok"]:
            raise BenchError(f"step {step} was not fetched: {outcome['why']}")
        return outcome

    def make_room(self, size: int) -> None:
        """The first node gets ready to fetch a snapshot of ``size`` bytes."""
        self.remotes[0].ask("make_room", size=size)

    def raw_listen(self, nbytes: int) -> int:
        """The second node's port for ``raw``."""
        return int(self.remotes[1].ask("raw_listen", nbytes=nbytes)["port"])

    def cpu(self) -> float:
        """Processor seconds that both nodes have taken so far."""
        return float(sum(remote.ask("cpu")["seconds"] for remote in self.remotes))

    def raw(self, nbytes: int, port: int, keep: bool) -> float:
        """Seconds for ``nbytes`` of plain TCP from the second node to the first; ``keep``: into
        new memory."""
        order = {"nbytes": nbytes, "host": ADDRESSES[1], "port": port, "keep": keep}
        return float(self.remotes[0].ask("raw_receive", **order)["seconds"])

    def alarms(self) -> list[str]:
        """Return the stores' complaints."""
        return [text for remote in self.remotes for text in remote.ask("alarms")["alarms"]]
