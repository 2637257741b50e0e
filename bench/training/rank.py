"""Parts of both workloads: rank and world under any launcher, and the notes for the benchmark."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

WARM_UP = 20  # steps of an incarnation that do not count for the step time
FIRST_STEPS = "first_steps.jsonl"
STEP = "step"
RESULT = "result.json"
RAISE = signal.SIGUSR1  # has the training's thread raise an exception
STUCK = signal.SIGUSR2  # has it wait for what does not come
OURS = ("bench", "__main__")  # modules in which an exception is the training's
SOON = 0.001  # s until an exception is tried again that would have come elsewhere
SECONDS = 60  # since the first step, of which each has its own mean


def step_file(replica: int) -> str:
    """Return the name of the file in which one of several replicas notes its steps."""
    return f"{STEP}-{replica}"


def parse() -> argparse.Namespace:
    """The options of a workload. ``step_time``: seconds of sleep in each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True, help="shared directory of this run")
    parser.add_argument("--steps", type=int, default=1_000_000_000)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--save", type=int, default=10)
    parser.add_argument("--device", default="cpu", help="of the workload device: cpu, cuda")
    parser.add_argument("--durable", action="store_true", help="every --save steps on disk, too")
    return parser.parse_args()


@dataclass
class Rank:
    """This process in its training. Every incarnation notes the wall time of its first step.

    ``file``: where the one with rank 0 notes its steps.
    """

    dir: Path
    file: str = STEP
    rank: int = field(init=False)
    world: int = field(init=False)
    _times: list[float] = field(default_factory=list)
    _began: float = 0.0
    _seconds: list[list[float]] = field(default_factory=lambda: [[] for _ in range(SECONDS)])
    _steps: int = 0
    _step_file: int = -1

    def __post_init__(self) -> None:
        signal.signal(RAISE, _fail)
        signal.signal(STUCK, _wait)
        env = os.environ
        self.rank = int(env.get("RANK") or env["SLURM_PROCID"])
        self.world = int(env.get("WORLD_SIZE") or env["SLURM_NTASKS"])
        if self.rank == 0:
            flags = os.O_WRONLY | os.O_CREAT
            self._step_file = os.open(self.dir / self.file, flags, 0o644)

    def stepped(self, step: int, seconds: float) -> None:
        """A step is done; ``seconds`` is how long it took."""
        self._steps += 1
        if self._steps == 1:
            note = {"rank": self.rank, "time": time.time(), "step": step}
            append(self.dir / FIRST_STEPS, json.dumps(note))
            self._began = time.monotonic()
        elif (second := int(time.monotonic() - self._began)) < SECONDS:
            self._seconds[second].append(seconds)
        if self._steps > WARM_UP:
            self._times.append(seconds)
            del self._times[:-2000]
        if self.rank == 0:
            os.pwrite(self._step_file, b"%12d" % step, 0)

    def done(self) -> None:
        """The training is over: rank 0 leaves its median step time in seconds, and the mean one of
        each second since its first step that was full."""
        if self.rank == 0:
            full = self._seconds[: int(time.monotonic() - self._began)]
            means = [statistics.fmean(times) if times else None for times in full]
            median = statistics.median(self._times)
            result = {"step_s": median, "steps": len(self._times), "seconds": means}
            atomic_write(self.dir / RESULT, json.dumps(result).encode())


def _fail(_signum: int, frame: FrameType | None) -> None:
    """Raise in the training's own code: what is raised in `save()` is only a step not saved."""
    while frame and (module := frame.f_globals.get("__name__", "")).partition(".")[0] not in OURS:
        if module.partition(".")[0] == "robust_slurm":
            threading.Timer(SOON, os.kill, (os.getpid(), RAISE)).start()
            return
        frame = frame.f_back
    raise RuntimeError("the benchmark's fault")


def _wait(_signum: int, _frame: object) -> None:
    time.sleep(3600)


def append(path: Path, line: str) -> None:
    """Append a line in one write, so that the lines of several ranks never mix."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)


def atomic_write(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves the old or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
