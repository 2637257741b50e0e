"""The replicas of torchft: one a machine, started again where it ends and the machine does not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import BenchError
from bench.fewer.site import RUNNING
from bench.training.job import Training
from bench.training.rank import step_file
from lab import Lab
from lab.errors import LabError
from lab.keeper.ranks import scan

STEP_TIME = 0.1
TORCHFT = os.environ.get("BENCH_TORCHFT", "")
"""Path of torchft's torchft_lighthouse, in an environment of its own; "": not compared."""
LIGHTHOUSE = 29510
MAJORITY = RUNNING // 2 + 1  # replicas; with fewer, two parts could each go on without the other
PAUSE = 1.0  # from the end of a replica until it is started again
TAIL = 25  # lines that are printed of the output of what ended


def committed(steps: Sequence[int]) -> int:
    """Return the newest step that a majority has committed, from the newest one of each."""
    return sorted(steps, reverse=True)[len(steps) // 2]


def tail(path: Path, lines: int = TAIL) -> str:
    """Return the last lines of an output, and where all of it lies."""
    try:
        text = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return f"{path}: no output"
    return "\n".join([f"{path}, the end of {len(text)} lines:", *text[-lines:]])


@dataclass(slots=True)
class Running:
    """The process on each node. ``lost``: the nodes whose end takes all on them along."""

    lost: Callable[[], Sequence[str]]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def ended(self) -> list[tuple[str, int]]:
        """Return the nodes that are there and whose process has ended, with its exit code."""
        codes = [(node, process.poll()) for node, process in list(self.processes.items())]
        gone = [(node, code) for node, code in codes if code is not None]
        return [(node, code) for node, code in gone if node not in self.lost()]


class Replicas:
    """``output``: a directory for a file of each replica's and the lighthouse's output.

    ``restarts``: how often a replica that had ended by itself was started again.
    """

    def __init__(
        self, lab: Lab, training: Training, output: Path, lost: Callable[[], Sequence[str]]
    ) -> None:
        self.restarts = 0
        self._lab = lab
        self._training = training
        self._output = output
        self._numbers: dict[str, int] = {}
        self._running = Running(lost)
        self._over = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[Replicas]:
        """Have a lighthouse, and look after the replicas; at the end, end all."""
        if not TORCHFT:
            raise BenchError("torchft: BENCH_TORCHFT must be the path of a torchft_lighthouse")
        argv = [TORCHFT, "--bind", f"[::]:{LIGHTHOUSE}", "--min_replicas", str(MAJORITY)]
        argv += ["--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "2000"]
        lighthouse = self._start("head", argv, {}, "lighthouse")
        watch = threading.Thread(target=self._watch)
        watch.start()
        try:
            yield self
            if lighthouse.poll() is not None:
                raise BenchError(f"its lighthouse ended\n{tail(self._file('lighthouse'))}")
        finally:
            self._over.set()
            watch.join()
            for process in scan():
                if process.environ.get("BENCH_TOKEN") == self._training.token:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, 9)
            lighthouse.kill()
            lighthouse.wait()

    def start(self, node: str) -> None:
        """Start the replica of a node, with the number that the node has had."""
        number = self._numbers.setdefault(node, len(self._numbers))
        env = self._training.env() | {
            "TORCHFT_LIGHTHOUSE": f"http://head:{LIGHTHOUSE}",
            "REPLICA_GROUP_ID": str(number),
            "MIN_REPLICA_GROUPS": str(MAJORITY),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_PORT": "29501",
        }
        argv = [str(Path(TORCHFT).with_name("python")), *self._training.command(STEP_TIME)]
        self._running.processes[node] = self._start(node, argv, env, f"replica-{node}")

    def steps(self, nodes: Sequence[str]) -> list[int]:
        """Return the newest step of each of these nodes' replicas."""
        return [self._training.step(step_file(self._numbers[node])) for node in nodes]

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            for node, code in self._running.ended():
                output = tail(self._file(f"replica-{node}"))
                print(
                    f"torchft: the replica on {node} ended with {code}: {output}", file=sys.stderr
                )
                if self._over.wait(PAUSE):
                    return
                self.restarts += 1
                with contextlib.suppress(LabError):  # the machine has gone meanwhile
                    self.start(node)

    def _file(self, name: str) -> Path:
        return self._output / f"{name}.log"

    def _start(
        self, node: str, argv: list[str], env: dict[str, str], name: str
    ) -> subprocess.Popen[bytes]:
        with self._file(name).open("ab") as output:
            return self._lab.popen(
                node,
                argv,
                env=env,
                cwd=self._training.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
