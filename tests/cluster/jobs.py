"""Toy trainings under robust-srun in a lab, as their user sees them: files, exit codes, Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import until

from lab import Lab, LabError
from lab.keeper.ranks import Process, scan
from robust_slurm import process_stat
from robust_slurm.slurm.values import expand
from robust_slurm.state_dir.ledger import WITHDRAWN
from srun_wrapper.decide.incident import PHASES

REPOSITORY = Path(__file__).resolve().parents[2]
TOY = Path(__file__).with_name("toy.py")
WAIT = 60.0
TORCH = {  # exports of trainings with torch, which tests hold still
    "OMP_NUM_THREADS": "1",  # more would fight for 2 cores
    "ROBUST_HANG_FLOOR": "300",  # to be held is no hang, however long the fault takes
}
# COMPLETING: with a dead node that could not be released Slurm takes SlurmdTimeout over the rest.
ENDED = ("COMPLETED", "COMPLETING", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "PREEMPTED")


def reference(steps: int, world: int) -> float:
    """The loss that toy.py ends with when nothing ever goes wrong (the same float operations)."""
    loss = 1.0
    for step in range(1, steps + 1):
        total = 0.0
        for rank in range(world):
            total += (rank + 1) * step
        loss = loss * 0.99 + total * 1e-6
    return loss


@dataclass
class Training:
    """One toy training; everything it leaves is below ``dir``, on the lab's shared directory."""

    lab: Lab
    dir: Path
    world: int
    steps: int
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    job: int = 0
    no_kill: bool = True
    user: bool = True  # or root
    looks: int = 0  # at the end of robust-srun, at nodes that it has lost

    @property
    def state(self) -> Path:
        return self.dir / "state"

    # -- starting

    def line(self, robust: Sequence[str], toy: Sequence[str]) -> str:
        """A robust-srun command line."""
        words = ["robust-srun", *robust, "python", str(TOY), "--dir", str(self.dir)]
        return " ".join([*words, "--steps", str(self.steps), *toy])

    def exports(self) -> dict[str, str]:
        return {
            "TOY_TOKEN": self.token,
            "PYTHONPATH": str(REPOSITORY),
            "ROBUST_STATE_DIR": str(self.state),
            "ROBUST_WARM": "0",  # 2 cores: importing ahead would slow what is tested
            "ROBUST_STOP_TESTS": "0",  # and so would tests of the machines
        }

    def submit(self, body: str, sbatch: Sequence[str]) -> None:
        lines = [f"export {name}={value}" for name, value in self.exports().items()]
        args = ["-o", str(self.dir / "out"), "--open-mode=append", "-D", str(self.dir), *sbatch]
        head = ["#!/bin/bash", *(["#SBATCH --no-kill"] if self.no_kill else [])]
        self.job = self.lab.sbatch("\n".join([*head, *lines, body, ""]), args, user=self.user)

    # -- what it says

    def out(self) -> str:
        path = self.dir / "out"
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, pattern: str) -> bool:
        return re.search(pattern, self.out(), re.MULTILINE) is not None

    def job_dir(self, job: int = 0) -> Path:
        return self.state / "jobs" / str(job or self.job)

    def records(self, name: str, job: int = 0) -> list[dict[str, Any]]:
        path = self.job_dir(job) / name
        if not path.exists():
            return []
        lines = path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def incidents(self, job: int = 0) -> list[dict[str, Any]]:
        return self.records("incidents.jsonl", job)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.records("events.jsonl") if e["event"] == name]

    def runs(self) -> list[list[str]]:
        """Nodes of the first epoch of each run of the job."""
        return [event["nodes"] for event in self.events("epoch") if event["epoch"] == 1]

    def rosters(self, job: int = 0) -> list[dict[str, Any]]:
        found = sorted(self.job_dir(job).glob("roster.*.json"))
        return [json.loads(path.read_text()) for path in found]

    def accusations(self, job: int = 0) -> dict[str, dict[str, Any]]:
        """Return the reports by node; those that were withdrawn as well."""
        return self._reports(job, withdrawn=False)

    def withdrawals(self, job: int = 0) -> dict[str, dict[str, Any]]:
        """Return the withdrawn reports by node."""
        return self._reports(job, withdrawn=True)

    def _reports(self, job: int, *, withdrawn: bool) -> dict[str, dict[str, Any]]:
        found = self.job_dir(job).glob("accusations/*.json")
        wanted = [path for path in found if path.name.endswith(WITHDRAWN) is withdrawn]
        records = [json.loads(path.read_text()) for path in wanted]
        return {record["node"]: record for record in records}

    def final(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.dir / "final.json").read_text())
        return found

    def nodes(self) -> str:
        """The node list of the job now, as Slurm writes it."""
        return self.lab.job(self.job)["NodeList"]

    # -- waiting

    def until(self, condition: Callable[[], Any], what: str, timeout: float = WAIT) -> None:
        def asked() -> Any:
            self._hurry()
            return condition()

        try:
            until(asked, what, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def wait_step(self, step: int, timeout: float = WAIT) -> None:
        self.until(lambda: self.says(rf"^step {step} "), f"step {step}", timeout)

    def wait_says(self, pattern: str, timeout: float = WAIT) -> None:
        self.until(lambda: self.says(pattern), f"output {pattern!r}", timeout)

    def wait_end(self, timeout: float = WAIT) -> int:
        """Wait for the end of the job; its exit code (negative: a signal)."""
        record: dict[str, str] = {}

        def ended() -> bool:
            record.update(self.lab.job(self.job))
            return record["JobState"] in ENDED

        self.until(ended, f"end of job {self.job}", timeout)
        code, _, signum = record["ExitCode"].partition(":")
        return -int(signum) if int(signum) else int(code)

    def story(self) -> str:
        """For a failed test's report."""
        events = [
            f"{event.pop('time'):.2f} {json.dumps(event)}" for event in self.records("events.jsonl")
        ]
        return "\n".join(
            ["--- output", self.out()[-3000:], "--- events", *events[-40:], *self._slurm()]
        )

    def _slurm(self) -> list[str]:
        """Describe the job and the nodes as Slurm has them."""
        try:
            job, nodes = self.lab.job(self.job), self.lab.node_records()
        except LabError as error:
            return [f"--- Slurm: {error}"]
        states = (f"{n} {r.get('State')} {r.get('Reason', '')}" for n, r in nodes.items())
        return [f"--- Slurm: {job.get('JobState')} {job.get('Reason')}; {', '.join(states)}"]

    def _hurry(self) -> None:
        """Signal a robust-srun that is done and looks for 10 s whether a lost node answers.

        One that the lab has crashed will not, and the tests would wait for minutes in all. A
        robust-srun that began after that line, the script's next one, is left alone.
        """
        looks = re.findall(r"^robust-srun: waiting up to \S+ s for .* of (\S+):", self.out(), re.M)
        if len(looks) > self.looks:
            self.looks = len(looks)
            faults = self.lab.faults()
            if all(faults.get(node) == "crashed" for node in expand(looks[-1])):
                said = time.time() - (self.dir / "out").stat().st_mtime
                for process in self.processes("bin/robust-srun"):
                    with contextlib.suppress(OSError, ValueError):
                        if age(process.pid) > said + 2:
                            os.kill(process.pid, signal.SIGTERM)

    # -- its processes

    def go_on(self) -> None:
        """Let it go on where ``--hold`` has it stay, from now on."""
        (self.dir / "go-on").touch()

    def processes(self, word: str = "", rank: int | None = None) -> list[Process]:
        """Return its processes on any node: with ``word`` in the command line, of one rank."""
        return [
            process
            for process in scan()
            if process.environ.get("TOY_TOKEN") == self.token
            and (rank is None or process.environ.get("RANK") == str(rank))
            and word in command_line(process.pid)
        ]

    def kill(self, word: str, rank: int | None = None) -> None:
        """SIGKILL for the first such process."""
        os.kill(self.processes(word, rank)[0].pid, signal.SIGKILL)

    # -- what must be true of every training

    def check_done(self, code: int = 0, timeout: float = WAIT) -> None:
        """Check that the job ended well, with an undisturbed run's loss, and left nothing."""
        got = self.wait_end(timeout)
        assert got == code, f"exit code {got}\n{self.story()}"
        assert self.final() == {"step": self.steps, "loss": reference(self.steps, self.world)}
        self.check_gone()
        left = self.in_memory()
        assert not left, left

    def check_gone(self) -> None:
        """No process of it on any node."""
        self.until(lambda: not self.processes(), "end of its processes", 15.0)

    def in_memory(self) -> dict[str, list[str]]:
        """Directories of shims in the memory of the nodes that are up, by node."""
        up = [name for name, fault in self.lab.faults().items() if fault == "up"]
        found = {name: self.lab.exec(name, ["ls", "/dev/shm"]).stdout.split() for name in up}
        ours = {name: [d for d in there if "robust-" in d] for name, there in found.items()}
        return {name: there for name, there in ours.items() if there}

    def only_incident(self, **expected: Any) -> dict[str, Any]:
        """The one incident of the job, complete, with these values."""
        found = self.incidents()
        assert len(found) == 1, self.story()
        check_incident(found[0], **expected)
        return found[0]


def check_incident(record: dict[str, Any], **expected: Any) -> None:
    """The record is complete and has these values."""
    assert {key: record[key] for key in expected} == expected, record
    phases = record["phases"]
    names = [name for name in PHASES if record.get("steps_seen", True) or name != "first_step"]
    assert list(phases) == [*names, "total"]
    assert all(seconds >= 0 for seconds in phases.values()), phases
    assert abs(sum(phases[name] for name in names) - phases["total"]) < 0.01, phases
    assert record["evidence"] and record["why"]


def command_line(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace")


def age(pid: int) -> float:
    """Seconds since it was started. Raises OSError or ValueError if it has ended."""
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - process_stat.read(pid).start / os.sysconf("SC_CLK_TCK")


def prepared(lab: Lab, world: int, steps: int = 40) -> Training:
    """A training whose directory exists; nothing is started."""
    directory = lab.shared / f"toy-{secrets.token_hex(4)}"
    directory.mkdir()
    os.chown(directory, lab.uid, lab.uid)
    return Training(lab, directory, world, steps)


def start(
    lab: Lab,
    nodes: int = 2,
    per_node: int = 1,
    *,
    toy: str = "",
    robust: str = "",
    sbatch: str = "",
    steps: int = 40,
    spares: int = 0,
    world: int | None = None,
    no_kill: bool = True,
    user: bool = True,
) -> Training:
    """Submit a toy training on ``nodes`` nodes and ``spares`` more (options are split at blanks).

    ``world``: the number of ranks where it is not nodes x per_node.
    """
    training = prepared(lab, world or nodes * per_node, steps)
    training.no_kill, training.user = no_kill, user
    options = [*([f"--robust-spares={spares}"] if spares else []), *robust.split()]
    size = [f"-N{nodes + spares}", f"--ntasks-per-node={per_node}"]
    training.submit(training.line(options, toy.split()), [*size, *sbatch.split()])
    return training
