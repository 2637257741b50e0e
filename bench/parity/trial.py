"""One run of a way, by srun or by robust-srun, in a lab; and what it leaves."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.chaos.job import Job
from bench.common import REPOSITORY
from bench.parity.judge import Remains, own_lines
from bench.parity.way import Way
from lab import Lab
from lab.keeper.ranks import scan
from lab.verbs.disruption import expand

PROGRAMS = Path(__file__).with_name("programs")
SRUN, ROBUST = "srun", "robust-srun"
TOKEN = "CHAOS_TOKEN"  # of bench.chaos, whose Job finds the processes by it
REASON = "parity"
"""The reason of drains that an event makes."""
SLURMS = "Kill task failed"
"""Slurm's own reason for a drain, which comes in a lab now and then (docs/lab.md)."""
LEFTOVERS = 25.0  # s after the end until files and processes count as left
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
_SCRIPT = """#!/bin/bash
export {token} PARITY_RANKS={meta}/ranks {state}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
echo "$SLURM_JOB_ID begin $EPOCHREALTIME $SLURM_JOB_NODELIST" >> {meta}/times
{before}
{lines}
parity_code=$?
echo "$SLURM_JOB_ID end $EPOCHREALTIME $parity_code" >> {meta}/times
exit $parity_code
"""


class ParityError(RuntimeError):
    """The way could not be run; nothing is proven."""


def prepare(lab: Lab) -> None:
    """Put the programs into the lab's shared file system, and on the mounts that stall."""
    programs = lab.shared / "programs"
    shutil.copytree(PROGRAMS, programs, ignore=shutil.ignore_patterns("__pycache__", "__init__.py"))
    for name, options in (("csave.so", ["-shared", "-fPIC"]), ("train", []), ("trace", [])):
        source = programs / Path(name).with_suffix(".c")
        compile_it = ["cc", *options, "-o", str(programs / name), str(source)]
        subprocess.run(compile_it, check=True, capture_output=True)
    for path in (programs, *programs.iterdir()):
        os.chown(path, lab.uid, lab.uid)
    if lab.spec.scratch:
        files = [str(path) for path in programs.iterdir() if path.is_file()]
        for node in lab.spec.train_names:  # standby nodes lack the program
            lab.exec(node, ["cp", "-p", *files, str(lab.scratch)], user=False, check=True)


@dataclass
class Trial:
    """One run; its papers (times, output, state directory) lie in `meta`, beside its directory."""

    lab: Lab
    way: Way
    launcher: str
    nodes: list[str]
    """The nodes of its job, in their order."""
    dir: Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    id: int = 0
    began: float = 0.0
    ended: float = 0.0
    late: bool = False
    """True: it had not ended at the deadline."""

    @classmethod
    def new(cls, lab: Lab, way: Way, launcher: str, nodes: list[str]) -> Trial:
        """Make the directories."""
        directory = lab.shared / way.name / launcher
        shutil.rmtree(directory, ignore_errors=True)  # of a run before
        for path in (directory.parent, directory, directory / "meta", directory / "cwd"):
            path.mkdir(exist_ok=True)
            os.chown(path, lab.uid, lab.uid)
        return cls(lab, way, launcher, nodes, directory)

    @property
    def meta(self) -> Path:
        """The directory of its papers."""
        return self.dir / "meta"

    @property
    def job(self) -> Job:
        """The job as bench.chaos reads its state directory and its processes."""
        return Job(self.lab, self.meta, 0, 0, token=self.token, id=self.id)

    def submit(self) -> None:
        """Submit the batch script."""
        way = self.way
        words = {
            "programs": f"{self.lab.shared}/programs",
            "scratch": str(self.lab.scratch) if self.lab.spec.scratch else "",
            "launcher": self.launcher,
            "meta": str(self.meta),
            "shared": str(self.lab.shared),
            "venv": sys.prefix,
            "examples": str(REPOSITORY / "examples"),
        }
        words["program"] = _fill(way.program, words)
        words["options"] = _fill(way.options, words)
        script = _SCRIPT.format(
            token=f"{TOKEN}={self.token}",
            meta=self.meta,
            state=f"ROBUST_STATE_DIR={self.meta}/state" if self.launcher == ROBUST else "",
            before=_fill(way.before, words),
            lines=_fill(way.lines, words),
        )
        files = ["-o", f"{self.meta}/out", "-e", f"{self.meta}/err", "--open-mode=append"]
        place = [f"-N{way.nodes}", "-w", ",".join(self.nodes), "-D", str(self.dir / "cwd")]
        name = [f"--job-name={self.name}", "--no-kill"]
        for node in self.nodes if way.full else ():
            self.lab.fill(node, way.full)
        self.id = self.lab.sbatch(script, [*files, *place, *name, *way.sbatch.split()])
        self.began = time.monotonic()

    @property
    def name(self) -> str:
        """The name of its job."""
        return f"{self.way.name}-{self.launcher}"

    # -- while it runs

    def text(self, name: str) -> str:
        """Return one of its papers."""
        path = self.meta / name
        return path.read_text(errors="replace") if path.exists() else ""

    def started(self) -> bool:
        """Report whether a rank has begun."""
        return bool(self.text("ranks"))

    def over(self) -> bool:
        """Report whether the script's lines have ended."""
        return self.text("times").count(" end ") >= self.way.jobs

    def rank(self, rank: int) -> int:
        """Return the pid of a rank's program. ParityError if there is none."""
        for process in sorted(scan()):
            env = process.environ
            mine = env.get(TOKEN) == self.token and env.get("SLURM_PROCID") == str(rank)
            if mine and self._is_program(process.pid):
                return process.pid
        raise ParityError(f"{self.name}: no process of rank {rank}")

    def _is_program(self, pid: int) -> bool:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            return any(b"/programs/" in word for word in words[:3]) and words[0] != b"srun"
        return False

    def scontrol(self, *words: str) -> None:
        """Run scontrol as root."""
        self.lab.exec("head", ["scontrol", *words], user=False, check=True)

    def states(self) -> set[str]:
        """Return the states of its jobs; empty while slurmctld does not answer."""
        words = ["squeue", "-h", "-t", "all", "-j", str(self.id), "-o", "%T"]
        try:
            return set(self.lab.exec("head", words, timeout=15).stdout.split())
        except subprocess.TimeoutExpired:
            return set()

    def wait(self, deadline: Callable[[], float]) -> None:
        """Wait until its job has ended, or cancel it at the deadline."""
        look = time.monotonic()
        pending = True
        while True:
            now = time.monotonic()
            if pending and self.text("times"):
                self.began, pending = now, False  # the time in the queue is nobody's fault
            if self.over() and not self.ended:
                self.ended, look = now, now
            if now >= look:
                states = self.states()
                if states and states <= _ENDED:
                    self.ended = self.ended or now
                    return
                look = now + (1.0 if self.ended else 15.0)
            if now > (self.ended + 120 if self.ended else deadline()):
                self.ended = self.ended or now
                self.late = True
                self.cancel()
                return
            time.sleep(0.2)

    def cancel(self) -> None:
        """Cancel all jobs of its name."""
        self.lab.exec("head", ["scancel", "--name", self.name], user=False)

    # -- what it leaves

    def remains(self) -> Remains:
        """Return what the run left, and clean up behind it."""
        states = self.states()
        seconds, code, scripts, places = self._times()
        text = self.text("out").replace(str(self.dir), "DIR")
        blamed, leftovers = self._blamed(), self._leftovers()
        self._clean()
        if (
            blamed
        ):  # Slurm 22.05 gives no exclusive job a node that such a job gave back, until then
            self.scontrol("reconfigure")
        return Remains(
            code=code,
            state="never ended" if self.late else " ".join(sorted(states)),
            seconds=seconds,
            out=tuple(sorted(text.splitlines())),
            err=own_lines(self.text("err").replace(str(self.dir), "DIR")),
            said=tuple(self.text("err").splitlines()),
            files=self._files(),
            starts=_starts(self.text("ranks"), places),
            scripts=scripts,
            blamed=tuple(blamed),
            leftovers=tuple(leftovers),
        )

    def _times(self) -> tuple[float, int | None, int, dict[str, list[str]]]:
        """Return seconds, exit code, number of begins, and each job's nodes."""
        begins: list[float] = []
        ends: list[float] = []
        code: int | None = None
        places: dict[str, list[str]] = {}
        for line in self.text("times").splitlines():
            job, what, at, value = line.split()
            moment = float(at.replace(",", "."))
            if what == "begin":
                begins.append(moment)
                places[job] = expand(value)
            else:
                ends.append(moment)
                code = max(code or 0, int(value))
        if not begins:
            raise ParityError(f"{self.name}: its script never began: {self.text('err')[-300:]}")
        last = max(ends, default=begins[0] + self.ended - self.began)
        return last - begins[0], code, len(begins), places

    def _files(self) -> dict[str, str]:
        found = {}
        cwd = self.dir / "cwd"
        for path in sorted(cwd.rglob("*")):
            name = str(path.relative_to(cwd))
            ignored = any(fnmatch.fnmatch(name, each) for each in self.way.ignore)
            if path.is_file() and not ignored:
                lines = sorted(path.read_bytes().splitlines())  # ranks write at any time
                found[name] = hashlib.sha256(b"\n".join(lines)).hexdigest()
        return found

    def _blamed(self) -> list[str]:
        if self.launcher == SRUN:
            return []
        found = {str(report["node"]) for report in self.job.reports()}
        found |= set(self.job.replaced())
        excluded = self.job.record().get("ExcNodeList", "(null)")
        found |= set() if excluded in ("", "(null)") else set(expand(excluded))
        return sorted(found | self._drained())

    def _drained(self) -> set[str]:
        """Return its nodes that are drained, but not by an event; put them all back."""
        found = set()
        for name, record in self.lab.node_records().items():
            if "DRAIN" in record.get("State", "") and name in self.nodes:
                if not any(each in record.get("Reason", "") for each in (REASON, SLURMS)):
                    found.add(name)
                self.scontrol("update", f"nodename={name}", "state=resume")
        return found

    def _leftovers(self) -> list[str]:
        deadline = time.monotonic() + LEFTOVERS
        while True:
            left = [f"process {each}" for each in self._processes()]
            for node in self.nodes:
                there = self.lab.exec(node, ["ls", "-A", "/dev/shm", "/tmp"]).stdout.split()
                left += [f"file {name}" for name in there if "robust-" in name]
            queue = self.lab.exec("head", ["squeue", "-h", "-t", "PD,R,S", "-o", "%i %j"])
            for line in queue.stdout.splitlines():
                number, name = line.split(" ", 1)
                mine = name == self.name or re.search(rf"\b{self.id}$", name)
                if mine and number != str(self.id):
                    left.append(f"job {name}")
            if not left or time.monotonic() > deadline or self.launcher == SRUN:
                return left
            time.sleep(2)

    def _processes(self) -> list[str]:
        found = []
        for process in scan():
            if process.environ.get(TOKEN) == self.token:
                with suppress(OSError):
                    words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
                    found.append(os.fsdecode(b" ".join(words[:2])).replace(str(self.dir), "DIR"))
        return sorted(found)

    def _clean(self) -> None:
        self.cancel()
        for process in scan():
            if process.environ.get(TOKEN) == self.token:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        for node in self.nodes:
            if self.way.full:
                self.lab.ask("heal", node=node)
            sweep = "rm -rf /dev/shm/* /tmp/robust-* /tmp/tmp*"
            self.lab.exec(node, ["sh", "-c", sweep], user=False)


def _fill(text: str, words: dict[str, str]) -> str:
    """Replace `{name}`; other braces are the shell's."""
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), text)


def _starts(text: str, places: dict[str, list[str]]) -> tuple[tuple[int, str], ...]:
    found = []
    for line in text.splitlines():
        job, rank, node = line.split()
        nodes = places.get(job, [])
        place = str(nodes.index(node)) if node in nodes else node
        found.append((int(rank), place))
    return tuple(found)
