"""A training of bench.chaos in a lab of its own: submit it, break it, look at what it left."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.chaos import rank as program
from bench.chaos.verdict import Observed, longest_gap
from bench.common import REPOSITORY
from lab import Lab, LabError
from lab.keeper.ranks import scan
from lab.verbs.disruption import expand
from robust_slurm.state_dir.files import read_incidents
from robust_slurm.state_dir.ledger import WITHDRAWN
from srun_wrapper.agent.processes import guardian

TOKEN = "CHAOS_TOKEN"
START_UP = 90.0  # s
LEFTOVERS = 25.0  # s after the end until files and processes count as left
_OPEN = ("PENDING", "RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED")
_SUCCESSOR = re.compile(r"is lost: it goes on as job (\d+)")
_GONE = ("lost", "dead", "evicted")  # parts of a node in the roster


class ChaosError(RuntimeError):
    """The case could not be brought about; nothing is proven by the run."""


@dataclass
class Job:
    """One training; everything it writes is below `dir`, unless a case moves it to the scratch."""

    lab: Lab
    dir: Path
    world: int
    steps: int
    stdin: bool = False
    state_on_scratch: bool = False
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    id: int = 0
    fault_at: float = 0.0
    reference: Callable[[], float] | None = None
    """The loss of an uninterrupted run; None: of the toy training."""

    @classmethod
    def new(cls, lab: Lab, world: int, steps: int) -> Job:
        """Make the directory, and copies of the program on every node's scratch."""
        directory = lab.shared / "chaos"
        directory.mkdir()
        shutil.copy(program.__file__, directory / "rank.py")
        shutil.copy(os.path.realpath(sys.executable), directory / "python")
        (directory / "data").write_bytes(b"x" * 8192)
        os.chown(directory, lab.uid, lab.uid)
        files = [str(directory / name) for name in ("rank.py", "python", "data")]
        for node in lab.spec.compute_names:
            lab.exec(node, ["cp", "-p", *files, str(lab.scratch)], user=False, check=True)
        return cls(lab, directory, world, steps)

    @property
    def state(self) -> Path:
        """The state directory, as the job sees it."""
        return (self.lab.scratch if self.state_on_scratch else self.dir) / "state"

    def submit(self, words: str, sbatch: Iterable[str]) -> None:
        """Submit `robust-srun WORDS`."""
        if self.stdin:
            lines = "".join(f"{number}\n" for number in range(1, self.steps + 1))
            (self.dir / "lines").write_text(lines)
            words += f" < {self.dir}/lines"
        env = {
            TOKEN: self.token,
            "PYTHONPATH": str(REPOSITORY),
            "ROBUST_STATE_DIR": str(self.state),
            "ROBUST_STOP_TESTS": "0",  # machine tests on two cores of many labs say nothing
        }
        script = ["#!/bin/bash", *(f"export {key}={value}" for key, value in env.items())]
        script += [f"exec robust-srun {words}", ""]
        output = ["-o", str(self.dir / "out"), "--open-mode=append", "-D", str(self.dir)]
        args = [*output, "--no-kill", "--requeue", *sbatch]
        self.id = self.lab.sbatch("\n".join(script), args)

    # -- what it says

    def out(self) -> str:
        """Return the output of the job."""
        path = self.dir / "out"
        return path.read_text(errors="replace") if path.exists() else ""

    def step_times(self) -> list[float]:
        """Wall times of the steps, as rank 0 wrote them."""
        path = self.dir / "steps"
        text = path.read_text() if path.exists() else ""
        return sorted(float(line.split()[0]) for line in text.splitlines() if " " in line)

    def wait(self, ready: Callable[[], bool], what: str, timeout: float = START_UP) -> None:
        """Wait for a condition. ChaosError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not ready():
            if time.monotonic() > deadline:
                raise ChaosError(f"{what}: not within {timeout:g} s\n{self.out()[-1500:]}")
            time.sleep(0.1)

    def wait_steps(self, count: int) -> None:
        """Wait until rank 0 has made so many steps more."""
        wanted = len(self.step_times()) + count
        self.wait(lambda: len(self.step_times()) >= wanted, f"{count} steps")

    def wait_warm(self) -> None:
        """Wait until every rank would start warm, as the roster says."""
        rosters = f"cat {self.state}/jobs/*/roster.*.json"

        def ready() -> bool:
            text = self.lab.exec("n1", ["sh", "-c", rosters]).stdout
            nodes = json.loads(text)["nodes"] if text else []
            return sum(int(node["warm"]) for node in nodes) == self.world

        self.wait(ready, "warm interpreters of all ranks")

    # -- its processes

    def pids(self, word: str, node: str = "", rank: int | None = None) -> list[int]:
        """Return its processes with `word` in the command line, on a node, of a rank."""
        found = []
        for process in scan():
            env = process.environ
            wrong_rank = rank is not None and env.get("RANK") != str(rank)
            if env.get(TOKEN) != self.token or wrong_rank:
                continue
            if node and env.get("SLURMD_NODENAME") != node:
                continue
            words = _command_line(process.pid)
            if word in words and not words.startswith("srun "):
                found.append(process.pid)
        return sorted(found)

    def shims(self, node: str) -> list[int]:
        """Return the shims of a node, its agent first; not the guardians that started them."""
        found = self.pids("srun_wrapper.agent.task", node)
        return [pid for pid in found if _name(pid) != guardian.NAME.decode()]

    def guardians(self, node: str) -> list[int]:
        """Return the processes of a node that start a shim once more when it dies."""
        found = self.pids("srun_wrapper.agent.task", node)
        return [pid for pid in found if _name(pid) == guardian.NAME.decode()]

    def supervisor(self) -> int:
        """Return the pid of robust-srun."""
        found = self.pids("/robust-srun ")
        if not found:
            raise ChaosError("no robust-srun is running")
        return found[0]

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank's process, once there is one: a restart may be under way."""
        found: list[int] = []

        def running() -> bool:
            found[:] = self.pids("rank.py", rank=rank)
            return bool(found)

        self.wait(running, f"a process of rank {rank}")
        os.kill(found[-1], number)

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents as robust-status JOB shows them, in their order."""
        found = []
        for path in (self.dir / "state").glob("jobs/*/incidents.jsonl"):
            incidents, problems = read_incidents(path.parent)
            if problems:
                raise ChaosError("; ".join(problems))
            found += [asdict(one) for one in incidents]
        return sorted(found, key=lambda record: record["time"])

    def began(self) -> float:
        """Wall time of the fault: the program's mark of it, or else the moment of the case."""
        marks = [path.stat().st_mtime for path in self.dir.glob("failed.*")]
        return min(marks, default=self.fault_at)

    # -- its end

    def scontrol(self, *words: str) -> None:
        """Run scontrol as root."""
        self.lab.exec("head", ["scontrol", *words], user=False, check=True)

    def record(self) -> dict[str, str]:
        """Return the job as Slurm has it; empty while slurmctld does not answer."""
        try:
            return self.lab.job(self.id)
        except (LabError, OSError):
            return {}

    def wait_end(self, timeout: float) -> str:
        """Return the job's state at its end, or at the deadline."""
        deadline = time.monotonic() + timeout
        settle = 0.0
        while True:
            record = self.record()
            state = record.get("JobState", "UNKNOWN").split()[0]
            if state == "COMPLETING":
                settle = settle or time.monotonic() + 4.0
                if time.monotonic() > settle:
                    return state
            elif state not in (*_OPEN, "UNKNOWN"):
                successors = _SUCCESSOR.findall(self.out())
                if not successors or int(successors[-1]) == self.id:
                    return state
                self.id = int(successors[-1])
            if time.monotonic() > deadline:
                return f"{state} {record.get('Reason', '')}"
            time.sleep(0.3)

    def _settled(self, timeout: float = 30.0) -> str:
        deadline = time.monotonic() + timeout
        while True:
            state = self.record().get("JobState", "UNKNOWN").split()[0]
            if state not in ("COMPLETING", "UNKNOWN"):
                return state
            if time.monotonic() > deadline:
                return "COMPLETED" if (self.dir / "final.json").exists() else state
            time.sleep(0.3)

    def observe(self, state: str) -> Observed:
        """Return what the run did, once the job has ended (or has not until the deadline)."""
        faults = self.lab.faults()
        if state == "COMPLETING":  # for SlurmdTimeout, with a node that crashed or hangs
            for node, fault in faults.items():
                if fault == "crashed":
                    self.lab.heal(node)
                elif fault != "up":  # Slurm may take 100 s to ask it again
                    self.lab.ask("heal", node=node)
            state = self._settled()
        for node, fault in faults.items():
            if fault not in ("up", "crashed"):
                self.lab.ask("heal", node=node)
        if self.state_on_scratch:
            self.lab.exec("n1", ["cp", "-r", str(self.state), str(self.dir)])
        up = [node for node, fault in faults.items() if fault != "crashed" and node != "head"]
        open_still = state.split()[0] in _OPEN
        records, reports = self.lab.node_records(), self.reports()
        final = self.dir / "final.json"
        return Observed(
            state=state,
            loss=json.loads(final.read_text())[1] if final.exists() else None,
            reference=self._reference(),
            reported=frozenset(str(report["node"]) for report in reports),
            lost_twice=frozenset(str(r["node"]) for r in reports if _lost_before(r)),
            excluded=frozenset(_nodes(self.record().get("ExcNodeList", ""))),
            drained=frozenset(n for n, r in records.items() if "DRAIN" in r.get("State", "")),
            replaced=frozenset(self.replaced()),
            leftovers={} if open_still else self._leftovers(up),
            gap=longest_gap(self.step_times(), self.fault_at),
        )

    def _reference(self) -> float:
        if self.reference is not None:
            return self.reference()
        return program.reference(self.steps, self.world, self.stdin)

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports that were not withdrawn."""
        found = {path.name: path for path in (self.dir / "state").glob("jobs/*/accusations/*")}
        names = [name for name in found if name.endswith(".json") and not name.startswith(".")]
        kept = [
            name
            for name in names
            if not name.endswith(WITHDRAWN) and name.removesuffix(".json") + WITHDRAWN not in names
        ]
        return [json.loads(found[name].read_text()) for name in kept]

    def replaced(self) -> list[str]:
        """Return the nodes that it lost or evicted."""
        rosters = (self.dir / "state").glob("jobs/*/roster.*.json")
        nodes = [node for path in rosters for node in json.loads(path.read_text())["nodes"]]
        return [str(node["name"]) for node in nodes if node["role"] in _GONE]

    def _leftovers(self, up: list[str]) -> dict[str, list[str]]:
        deadline = time.monotonic() + LEFTOVERS
        while True:
            found: dict[str, list[str]] = {}
            for node in up:
                there = self.lab.exec(node, ["ls", "-A", "/dev/shm", "/tmp"]).stdout.split()
                found[node] = [name for name in there if "robust-" in name]
            found["processes"] = [_command_line(pid)[:80] for pid in self.pids("")]
            queue = self.lab.exec("head", ["squeue", "-h", "-t", "PD,R,S", "-o", "%i %j %T"])
            found["jobs"] = queue.stdout.splitlines()
            left = {where: names for where, names in found.items() if names}
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.5)


def _nodes(text: str) -> list[str]:
    return [] if text in ("", "(null)") else expand(text)


def _lost_before(report: dict[str, Any]) -> bool:
    start = f"{report['node']}: lost before, "
    return any(str(line).startswith(start) for line in report["evidence"])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace")
