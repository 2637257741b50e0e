"""Real trainings with a Checkpointer in a lab, and the same ones undisturbed on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jobs import REPOSITORY, TORCH, Training, prepared
from torch_forks import TorchForks, all_end_well

from lab import Lab
from robust_slurm.checkpoint.format.layout import LayoutError, read_snapshot
from srun_wrapper.agent.processes.ports import free_port

pytest.importorskip("torch")
pytest.importorskip("torchdata")

PROGRAMS = REPOSITORY / "tests" / "programs"
WAIT = 150.0  # s; importing torch in every rank is most of it

Line = dict[str, Any]
Curve = dict[int, Line]
"""One rank's lines by step: loss, ids of the samples, checksum of its state."""


def read_lines(path: Path) -> list[Line]:
    """A rank's journal; a line that a crash tore is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def survivors(lines: Iterable[Line]) -> Curve:
    """The steps that count in the end: a resume at step s takes back all after s.

    Each must follow the one before it, so that none is left out or done twice.
    """
    curve: Curve = {}
    for line in lines:
        if "resumed" in line:
            assert line["resumed"] <= len(curve), f"resumed where it never was: {line}"
            curve = {step: done for step, done in curve.items() if step <= line["resumed"]}
        elif "step" in line:
            assert line["step"] == len(curve) + 1, f"after step {len(curve)} came {line}"
            curve[line["step"]] = {name: line[name] for name in ("loss", "ids", "state")}
    return curve


_PROGRAM = """
import os, runpy, sys
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_here(
    forks: TorchForks, program: str, directory: Path, world: int, *options: str
) -> list[str]:
    """Run a program as ranks on this machine; what each printed. They must succeed."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    words = [str(PROGRAMS / program), f"--dir={directory}", *options]
    ranks = [
        forks.start(_PROGRAM, *words, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    all_end_well(ranks, WAIT)
    return [rank.out() + rank.err() for rank in ranks]


class Undisturbed(NamedTuple):
    """A run of a program that nothing disturbed and that saved nothing."""

    program: str
    world: int
    steps: int
    options: Sequence[str]
    """For every run of the program."""
    curves: Sequence[Curve]
    """One curve for each rank."""

    def job(self, lab: Lab) -> CheckpointJob:
        """A training that must do the same; its directory exists, nothing is started."""
        return CheckpointJob(lab, prepared(lab, self.world).dir, self.world, self.steps, model=self)


def undisturbed(
    forks: TorchForks, program: str, directory: Path, world: int, steps: int, *options: str
) -> Undisturbed:
    run_here(forks, program, directory, world, f"--steps={steps}", "--bare", "--pause=0", *options)
    curves = [survivors(read_lines(directory / f"rank-{rank}.jsonl")) for rank in range(world)]
    return Undisturbed(program, world, steps, options, curves)


class Copy(NamedTuple):
    """A snapshot file in a node's memory."""

    node: str
    owner: int
    step: int | None
    """None: not complete."""
    kind: str
    """own, replica, fetched"""
    path: Path
    """The path on the host, while the process that shows it lives."""


class Start(NamedTuple):
    """One epoch's lines of the ranks that got so far."""

    resumed: set[int]
    saved: set[int]


@dataclass
class CheckpointJob(Training):
    """One of tests/programs in place of the toy."""

    model: Undisturbed = field(kw_only=True)

    def exports(self) -> dict[str, str]:
        return super().exports() | TORCH

    @property
    def directory(self) -> Path:
        """For the durable checkpoints."""
        return self.dir / "checkpoints"

    def words(self, *options: str) -> str:
        words = [str(PROGRAMS / self.model.program), f"--dir={self.dir}", f"--steps={self.steps}"]
        return " ".join([*words, *self.model.options, *options])

    def start(
        self, robust: str, options: str = "", *, sbatch: Sequence[str] = (), durable: bool = True
    ) -> None:
        """Submit it: robust-srun's options, the program's, sbatch's.

        Every step is saved, whatever it costs, unless the options say otherwise: which steps are
        lost must not depend on how busy the machine is.
        """
        if "checkpoint-overhead" not in robust:
            robust = f"--robust-checkpoint-overhead=0 {robust}"
        more = [f"--directory={self.directory}"] if durable else []
        line = f"robust-srun {robust} python {self.words(*more, *options.split())}"
        self.submit(line, sbatch)

    # -- what its ranks wrote

    def lines(self, rank: int) -> list[Line]:
        return read_lines(self.dir / f"rank-{rank}.jsonl")

    def reached(self, step: int, epoch: int = 1) -> bool:
        """Return whether every rank has saved a step in this epoch."""
        return all(
            any(li["epoch"] == epoch and li.get("saved", 0) >= step for li in self.lines(rank))
            for rank in range(self.world)
        )

    def wait_saved(self, step: int, epoch: int = 1) -> None:
        self.until(lambda: self.reached(step, epoch), f"step {step} in epoch {epoch}", WAIT)

    def starts(self) -> list[Start]:
        """Return the outcome of each start of the ranks, the first one first."""
        found: dict[tuple[str, int], Start] = {}
        for rank in self.ranks:
            for line in self.lines(rank):
                start = found.setdefault((line["run"], line["epoch"]), Start(set(), set()))
                if "resumed" in line:
                    start.resumed.add(line["resumed"])
                elif "saved" in line:
                    start.saved.add(line["saved"])
        runs = list(dict.fromkeys(run for run, _ in found))
        return [found[key] for key in sorted(found, key=lambda k: (runs.index(k[0]), k[1]))]

    def resumed(self) -> list[int]:
        """The step that each start of the ranks resumed at, the same on all ranks."""
        found = [start.resumed for start in self.starts()]
        assert all(len(steps) == 1 for steps in found), found
        return [min(steps) for steps in found]

    @property
    def ranks(self) -> range:
        return range(self.world)

    # -- holding it still

    def wait_held(self, epoch: int, step: int) -> None:
        """All ranks stay at the beginning of a step."""
        names = [self.dir / f"held.{epoch}.{step}.{rank}" for rank in self.ranks]
        self.until(lambda: all(n.exists() for n in names), f"hold in {epoch}:{step}", WAIT)

    # -- the nodes' memory

    def copies(self) -> list[Copy]:
        """All snapshot files in the memory of the job's nodes that run."""
        roots = {
            process.environ.get("SLURMD_NODENAME", ""): Path(f"/proc/{process.pid}/root")
            for process in self.processes("srun_wrapper.agent.task")
        }
        found = []
        for node, root in roots.items():
            for path in root.glob(f"dev/shm/robust-{self.job}.*/ckpt/*.safetensors"):
                kind, owner, _ = path.name.split("-")
                try:
                    step = read_snapshot(str(path))[0].step
                except (OSError, LayoutError):
                    step = None
                found.append(Copy(node, int(owner), step, kind, path))
        return found

    def copy(self, kind: str, owner: int, step: int) -> Copy | None:
        here = [c for c in self.copies() if (c.kind, c.owner, c.step) == (kind, owner, step)]
        return here[0] if here else None

    def wait_replicas(self, step: int) -> None:
        """Wait for the replica of every rank's snapshot of a step."""
        for owner in self.ranks:
            self.wait_copy("replica", owner, step)

    def wait_copy(self, kind: str, owner: int, step: int) -> Copy:
        what = f"{kind} copy of rank {owner}'s step {step}"
        self.until(lambda: self.copy(kind, owner, step), what, 30.0)
        found = self.copy(kind, owner, step)
        assert found is not None
        return found

    # -- what must be true

    def said_alarms(self) -> list[str]:
        return [event["text"] for event in self.events("checkpoint_alarm")]

    def lost(self) -> list[int]:
        """Return how many saved steps the ranks did again after each fault, by their journals."""
        lost, newest = [], 0
        for start in self.starts():
            (resumed,) = start.resumed
            lost.append(newest - resumed)
            newest = max(start.saved, default=resumed)
        return lost[1:]

    def check_lost(self, count: int) -> list[dict[str, Any]]:
        """Check ``count`` incidents: each mended from memory, and at most one step lost."""
        found = self.incidents()
        assert len(found) == count, self.story()
        assert all(0 <= steps <= 1 for steps in self.lost()), self.story()
        for record in found:
            recovered = record["outcome"] == "recovered"
            assert recovered or record["outcome"] == "superseded by another failure", self.story()
            assert not recovered or record["lost_steps"] <= 1, self.story()
        assert {event["tier"] for event in self.events("restore")} == {"memory"}, self.story()
        return found

    def check_curves(self) -> None:
        """Every rank did steps 1 … steps, each as in the undisturbed run, to the last bit.

        That holds for what was done again, too.
        """
        for rank in self.ranks:
            lines = self.lines(rank)
            for line in lines:
                if "step" in line:
                    done = {name: line[name] for name in ("loss", "ids", "state")}
                    should = self.model.curves[rank][line["step"]]
                    assert done == should, f"rank {rank}: {line}, not {should}"
            curve = survivors(lines)
            assert list(curve) == list(range(1, self.steps + 1)), f"rank {rank}: {list(curve)}"

    def check_ended(self, code: int = 0) -> None:
        """Check that the job ended well, left nothing, and has the undisturbed run's curves."""
        got = self.wait_end(WAIT)
        assert got == code, f"exit code {got}\n{self.story()}"
        self.check_curves()
        self.check_gone()
        left = self.in_memory()
        assert not left, left
