"""A rank's process of any side, seen from the benchmark: orders, CPU time, memory."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.common import REPOSITORY, BenchError
from bench.scale.usage import cpu_s, parse_kib

DEADLINE = 120.0


class Child:
    """``python -m bench.data.rank`` in an interpreter of its side's."""

    def __init__(
        self, spec: Mapping[str, Any], python: str = "", env: Mapping[str, str] | None = None
    ) -> None:
        self.spec = dict(spec)
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", "bench.data.rank", json.dumps(self.spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def ready(self) -> None:
        """Wait until its modules are imported."""
        self.answer()

    def ask(self, order: str) -> dict[str, Any]:
        """Give an order; its answer."""
        self.tell(order)
        return self.answer()

    def tell(self, order: str) -> None:
        """Give an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")

    def answer(self) -> dict[str, Any]:
        """Wait for an answer. BenchError if there is none."""
        assert self._process.stdout is not None
        if select.select([self._process.stdout], [], [], DEADLINE)[0]:
            line = self._process.stdout.readline()
            if line.startswith("{"):
                return dict(json.loads(line))
        raise BenchError(f"{self.spec['side']}: no answer; its messages are above")

    def kill(self) -> None:
        """End it and its own processes, as a fault would."""
        end(self.pid)
        self._process.wait()  # finds it reaped
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def tree(roots: Iterable[int], proc: Path = Path("/proc")) -> list[int]:
    """Return these processes and all below them."""
    parents: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(roots)
    for pid in found:
        found += parents.get(pid, [])
    return found


def end(pid: int) -> None:
    """Kill a child of this process and all below it; reap it if Popen does not."""
    signal_all(tree([pid]), signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes so far."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += cpu_s(pid)
    return total


def pss_mb(pids: Iterable[int]) -> float:
    """Return the memory of these processes; of a page that several have, each counts its part."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += parse_kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss") * 1024 / 1e6
    return total
