"""robust-srun and srun beside each other in one allocation, for the parity tests."""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import until

from lab import Cluster

TOOLS = ("srun", "robust-srun")
NODES = 3
DEADLINE = 60.0


@dataclass
class Allocation:
    """A job that only holds nodes; commands run beside its batch script, with its environment."""

    lab: Cluster
    job: int
    env: dict[str, str]

    def directory(self, tool: str) -> Path:
        path = Path(tempfile.mkdtemp(prefix=f"{tool}-", dir=self.lab.shared))
        path.chmod(0o755)
        os.chown(path, self.lab.uid, self.lab.uid)
        return path

    @contextlib.contextmanager
    def start(
        self, argv: list[str], cwd: Path, env: dict[str, str] | None = None, **popen: Any
    ) -> "Iterator[subprocess.Popen[bytes]]":
        process = self.lab.popen("n1", argv, env=self.env | (env or {}), cwd=cwd, **popen)
        try:
            yield process
        finally:
            process.kill()  # the command dies with it
            process.wait()

    def run(
        self, argv: list[str], cwd: Path, env: dict[str, str] | None = None, stdin: bytes = b""
    ) -> "Result":
        pipe = subprocess.PIPE
        source = pipe if stdin else subprocess.DEVNULL
        with self.start(argv, cwd, env, stdin=source, stdout=pipe, stderr=pipe) as process:
            out, err = process.communicate(stdin or None, timeout=DEADLINE)
        return Result(process.returncode, out, err, cwd)

    def step_of(self, process: "subprocess.Popen[bytes]") -> str:
        """ "JOB.STEP" of the one step that runs now."""
        ids: list[str] = []

        def found() -> bool:
            assert process.poll() is None, "the step ended before it was seen"
            ids[:] = self.steps()
            return bool(ids)

        until(found, "its step", DEADLINE)
        return ids[0]

    def steps(self) -> list[str]:
        """Return "JOB.STEP" of the job's steps, less its batch script's and Slurm's own."""
        done = self.lab.exec("head", ["squeue", "-h", "-s", "-o", "%i", "-j", str(self.job)])
        return [i for i in done.stdout.split() if i.partition(".")[2].isdigit()]


# What Slurm says about the step itself rather than about what ran in it. (That a node "was down" it
# says now and then when output of a node comes after the node's end was told.)
_CHATTER = re.compile(
    rb"robust-srun: |robust-task: |slurmstepd|"
    rb"srun: (Job \d+ step creation temporarily|Step created|Force Terminated|Job step aborted)|"
    rb"srun: launch/slurm: _step_signal: Terminating|"
    rb"srun: error: .*: (Killed|Terminated|Aborted|Segmentation|Exited with exit code)|"
    rb"srun: error: IO: Hey, you told me node \d+ was down!"
)


@dataclass
class Result:
    code: int
    out: bytes
    err: bytes
    cwd: Path

    @property
    def err_lines(self) -> list[bytes]:
        return sorted(line for line in self.err.splitlines() if not _CHATTER.match(line))

    @property
    def out_lines(self) -> list[bytes]:
        return sorted(self.out.splitlines())

    def files(self) -> dict[str, list[bytes]]:
        paths = [p for p in self.cwd.rglob("*") if p.is_file()]
        return {str(p.relative_to(self.cwd)): sorted(p.read_bytes().splitlines()) for p in paths}


def parity_lab() -> Cluster:
    """The nodes of the allocation and one more."""
    return Cluster(nodes=NODES + 1, standby=0, gpus=4)


def allocate(lab: Cluster) -> Allocation:
    """A job on all nodes but the last."""
    script = "#!/bin/bash\nenv -0 > .env.$SLURM_JOB_ID.part\n"
    script += "mv .env.$SLURM_JOB_ID.part .env.$SLURM_JOB_ID\nsleep 3600\n"
    options = [f"-N{NODES}", "-w", f"n[1-{NODES}]", "--ntasks-per-node=4", "--gres=gpu:h100:4"]
    job = lab.sbatch(script, ["--no-kill", *options, "--exclusive"])
    path = lab.shared / f".env.{job}"
    until(path.exists, "the allocation", DEADLINE)
    pairs = (p.partition("=") for p in path.read_text().split("\0") if p)
    found = Allocation(lab, job, {name: value for name, _, value in pairs})
    # What describes sbatch's own wishes would only make both tools warn about every -n.
    for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"):
        found.env.pop(name, None)
    found.env["SLURM_OVERLAP"] = "1"  # a step that ends a little late holds nobody up
    return found


def both(
    alloc: Allocation,
    argv: list[str],
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
    files: dict[str, str] | None = None,
) -> tuple[Result, Result]:
    """Run the same words under both, in directories of their own.

    Side by side on 22.05. Later releases look for a step's nodes behind those of the step before;
    after a step on all nodes that begins at the job's first (-r0) they begin at the same one.
    """

    def run(tool: str) -> Result:
        cwd = alloc.directory(tool)
        for name, text in (files or {}).items():
            (cwd / name).write_text(text)
            os.chown(cwd / name, alloc.lab.uid, alloc.lab.uid)
        return alloc.run([tool, *argv], cwd, env, stdin)

    if alloc.lab.spec.slurm == "22.05":
        with ThreadPoolExecutor(2) as pool:
            plain, robust = pool.map(run, TOOLS)
        return plain, robust
    found = []
    for tool in TOOLS:
        alloc.run(["srun", "-r0", f"-N{NODES}", "true"], alloc.lab.shared)
        until(lambda: not alloc.steps(), "the end of the step before", DEADLINE)
        found.append(run(tool))
    return found[0], found[1]
