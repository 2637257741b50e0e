"""robust-srun beside srun in one allocation: the same output, files, environment and exit code."""

import json
import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lab import Cluster, LabError, host


def _no_lab_here() -> str:
    try:
        host.check_host()
    except LabError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(_no_lab_here()), reason=_no_lab_here() or "a lab can run here"),
]

TOOLS = ("srun", "robust-srun")
NODES = 3
DEADLINE = 60.0


def eventually(condition: Callable[[], bool], timeout: float = DEADLINE) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.02)


@dataclass
class Allocation:
    """A job that only holds nodes; commands run beside its batch script, with its environment."""

    lab: Cluster
    job: int
    env: dict[str, str]
    count: int = 0

    def directory(self, tool: str) -> Path:
        self.count += 1
        path = self.lab.shared / f"{self.count}-{tool}"
        path.mkdir()
        os.chown(path, self.lab.uid, self.lab.uid)
        return path

    def start(
        self, argv: list[str], cwd: Path, env: dict[str, str] | None = None, **popen: object
    ) -> "subprocess.Popen[bytes]":
        return self.lab.popen("n1", argv, env=self.env | (env or {}), cwd=cwd, **popen)

    def run(
        self, argv: list[str], cwd: Path, env: dict[str, str] | None = None, stdin: bytes = b""
    ) -> "Result":
        pipe = subprocess.PIPE
        with self.start(argv, cwd, env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            try:
                out, err = process.communicate(stdin, timeout=DEADLINE)
            finally:
                process.kill()
        return Result(process.returncode, out, err, cwd)

    def step_of(self, process: "subprocess.Popen[bytes]") -> str:
        """"JOB.STEP" of the one step that runs now."""
        ids: list[str] = []

        def found() -> bool:
            assert process.poll() is None, "the step ended before it was seen"
            done = self.lab.exec("head", ["squeue", "-h", "-s", "-o", "%i", "-j", str(self.job)])
            ids[:] = [i for i in done.stdout.split() if i.partition(".")[2].isdigit()]
            return bool(ids)

        eventually(found)
        return ids[0]


# What Slurm says about the step itself rather than about what ran in it.
_CHATTER = re.compile(
    rb"robust-srun: |robust-task: |slurmstepd|"
    rb"srun: (Job \d+ step creation temporarily|Step created|Force Terminated|Job step aborted)|"
    rb"srun: error: .*: (Killed|Terminated|Exited with exit code)"
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


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with Cluster(nodes=NODES + 1, standby=0, gpus=4) as cluster:
        yield cluster


def allocate(lab: Cluster, *options: str) -> Allocation:
    script = "#!/bin/bash\nenv -0 > .env.$SLURM_JOB_ID.part\n"
    script += "mv .env.$SLURM_JOB_ID.part .env.$SLURM_JOB_ID\nsleep 3600\n"
    job = lab.sbatch(script, ["--no-kill", *options])
    path = lab.shared / f".env.{job}"
    eventually(path.exists)
    pairs = (p.partition("=") for p in path.read_text().split("\0") if p)
    return Allocation(lab, job, {name: value for name, _, value in pairs})


@pytest.fixture(scope="module")
def timed(lab: Cluster) -> Allocation:
    """A job of its own that meets its time limit while the other tests run."""
    return allocate(lab, "-N1", "-w", f"n{NODES + 1}", "--time=1")


@pytest.fixture(scope="module")
def alloc(lab: Cluster) -> Allocation:
    options = ["-w", f"n[1-{NODES}]", "--ntasks-per-node=4", "--gres=gpu:h100:4", "--exclusive"]
    found = allocate(lab, f"-N{NODES}", *options)
    # What describes sbatch's own wishes would only make both tools warn about every -n.
    for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"):
        found.env.pop(name, None)
    return found


def both(
    alloc: Allocation,
    argv: list[str],
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
    files: dict[str, str] | None = None,
) -> tuple[Result, Result]:
    results = []
    for tool in TOOLS:
        cwd = alloc.directory(tool)
        for name, text in (files or {}).items():
            (cwd / name).write_text(text)
            os.chown(cwd / name, alloc.lab.uid, alloc.lab.uid)
        results.append(alloc.run([tool, *argv], cwd, env, stdin))
    return results[0], results[1]


# -- the table --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One command line for both. ``code``: what srun itself must say, or the case is void."""

    argv: str
    shell: str
    code: int = 0
    env: dict[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    files: dict[str, str] = field(default_factory=dict)


WHO = "echo out $SLURM_PROCID of $SLURM_NTASKS on $(hostname); echo err $SLURM_PROCID >&2"
LINES = "for i in 1 2 3; do echo $SLURM_PROCID line $i; done; printf 'no end'"
ONCE = {"ROBUST_MAX_RESTARTS": "0"}
FAIL = "[ $SLURM_PROCID = {0} ] && {1}; exit 0"

CASES = {
    "plain": Case("-n6", WHO),
    "one task per node": Case("-N3 --ntasks-per-node=1", WHO),
    "uneven": Case("-N3 -n4", WHO),
    "cyclic": Case("-N3 -n6 -m cyclic", WHO),
    "ntasks per node": Case("-N2 --ntasks-per-node=3", WHO),
    "cpus per task": Case("-n2 -c2", WHO + "; echo cpus $SLURM_CPUS_PER_TASK"),
    "cpu bind": Case("-n2 --cpu-bind=none", WHO),
    "gres": Case("-N2 -n2 --gres=gpu:h100:2", WHO + "; echo $CUDA_VISIBLE_DEVICES"),
    "no gres": Case("-N2 -n2 --gres=none", WHO + "; echo [$CUDA_VISIBLE_DEVICES]"),
    "nodelist": Case("-w n2,n3 -n2", WHO),
    "relative": Case("-r1 -N2 -n2", WHO),
    "label 2": Case("-l -n2", LINES),
    "label 12": Case("-n12 --label", LINES),
    "label by environment": Case("-n2", WHO, env={"SLURM_LABELIO": "1"}),
    "unbuffered": Case("-u -n3", WHO),
    "output to a file": Case("-n3 --output=all.txt", WHO),
    "output to a file, labelled": Case("-ln3 --output=all.txt", LINES),
    "output per task": Case("-n3 -o out.%t", WHO),
    "output per node and task": Case("-N3 -n3 -o out.%N.%2t --error=err.%n", WHO),
    "output and error apart": Case("-n3 -o out.txt -e err.txt", WHO),
    "output per task, error to srun": Case("-n3 -o out.%t -e all", WHO),
    "no output": Case("-n3 --output=none", WHO),
    "no error": Case("-n3 --error=none", WHO),
    "one task's output": Case("-n3 --output=1", WHO),
    "job and step in the name": Case("-n2 -o %x-%u-%%-%t.txt", WHO, env={"SLURM_JOB_NAME": "j"}),
    "append": Case("-n2 --open-mode=append -o out.%t", WHO, files={"out.0": "old\n"}),
    "append, one file": Case("-n2 --open-mode=append -o all", WHO, files={"all": "old\n"}),
    "truncate": Case("-n2 --open-mode=truncate -o out.%t", WHO, files={"out.0": "old\n"}),
    "output in the environment": Case("-n2", WHO, env={"SLURM_STDOUTMODE": "o.%t"}),
    "stdin to all": Case("-n3", "sed s/^/$SLURM_PROCID:/", stdin=b"hi\nthere\n"),
    "stdin to task 1": Case("-n3 --input=1", "sed s/^/$SLURM_PROCID:/", stdin=b"hi\n"),
    "stdin from a file": Case("-n2 --input=in.txt", "cat", files={"in.txt": "from file\n"}),
    "stdin from files": Case("-n2 -i in.%t", "cat", files={"in.0": "a\n", "in.1": "b\n"}),
    "no stdin": Case("-n2 --input=none", "cat; echo end", stdin=b"hi\n"),
    "exit code 3 of one": Case("-n3", FAIL.format(1, "exit 3"), 3, ONCE),
    "highest exit code": Case("-n3", "exit $((SLURM_PROCID * 5))", 10, ONCE),
    "exit code 255": Case("-n1", "exit 255", 255, ONCE),
    "killed": Case("-n1", "kill -KILL $$", 137, ONCE),
    "segmentation fault": Case("-n1", "kill -SEGV $$", 139, ONCE),
    "one of three aborted": Case("-n3", FAIL.format(2, "kill -ABRT $$"), 134, ONCE),
    "export none": Case("-n2 --export=NONE", "echo ${FOO-unset} $SLURM_NTASKS", env={"FOO": "1"}),
    "export some": Case("-n2 --export=FOO", "echo ${FOO-unset} ${BAR-unset}", env={"FOO": "1"}),
    "export more": Case("-n2 --export=ALL,FOO=2", "echo $FOO $BAR", env={"FOO": "1", "BAR": "3"}),
    "export in the environment": Case(
        "-n2", "echo ${FOO-unset}", env={"SLURM_EXPORT_ENV": "NONE", "FOO": "1"}
    ),
    "chdir": Case("-n2 --chdir=/usr", "pwd"),
    "no such option": Case("--nonsense -n2", WHO, 255),
    "too many nodes": Case("-N9", WHO, 1),
    "no such node": Case("-w nowhere -n1", WHO, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_srun(alloc: Allocation, name: str) -> None:
    case = CASES[name]
    argv = [*case.argv.split(), "bash", "-c", case.shell]
    plain, robust = both(alloc, argv, case.env, case.stdin, case.files)
    assert plain.code == case.code, plain.err.decode()
    assert robust.code == plain.code, robust.err.decode()
    assert robust.out_lines == plain.out_lines
    assert robust.err_lines == plain.err_lines
    assert robust.files() == plain.files()
