"""robust-srun beside srun in one allocation: the same output, files, environment and exit code."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import LabFactory
from jobs import start, until

from lab import Cluster

TOOLS = ("srun", "robust-srun")
NODES = 3
DEADLINE = 20.0


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
            done = self.lab.exec("head", ["squeue", "-h", "-s", "-o", "%i", "-j", str(self.job)])
            ids[:] = [i for i in done.stdout.split() if i.partition(".")[2].isdigit()]
            return bool(ids)

        eventually(found)
        return ids[0]


# What Slurm says about the step itself rather than about what ran in it.
_CHATTER = re.compile(
    rb"robust-srun: |robust-task: |slurmstepd|"
    rb"srun: (Job \d+ step creation temporarily|Step created|Force Terminated|Job step aborted)|"
    rb"srun: error: .*: (Killed|Terminated|Aborted|Segmentation|Exited with exit code)"
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
def timed(lab: Cluster) -> dict[str, tuple[int, Path]]:
    """Per tool a job that meets its time limit, of a minute, while the other tests run."""
    found = {}
    for tool in TOOLS:
        cwd = lab.shared / f"timed-{tool}"
        cwd.mkdir()
        os.chown(cwd, lab.uid, lab.uid)
        (cwd / "count.py").write_text(_COUNT)
        script = f"#!/bin/bash\nexport ROBUST_STATE_DIR=state\n{tool} -n2 python count.py\n"
        options = ["-N1", "-n2", "-w", f"n{NODES + 1}", "--time=1", "-D", str(cwd)]
        found[tool] = (lab.sbatch(script, options), cwd)
    return found


@pytest.fixture(scope="module")
def alloc(lab: Cluster, timed: object) -> Allocation:
    options = ["-w", f"n[1-{NODES}]", "--ntasks-per-node=4", "--gres=gpu:h100:4", "--exclusive"]
    found = allocate(lab, f"-N{NODES}", *options)
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
    """Run the same words under both, side by side in directories of their own."""

    def run(tool: str) -> Result:
        cwd = alloc.directory(tool)
        for name, text in (files or {}).items():
            (cwd / name).write_text(text)
            os.chown(cwd / name, alloc.lab.uid, alloc.lab.uid)
        return alloc.run([tool, *argv], cwd, env, stdin)

    with ThreadPoolExecutor(2) as pool:
        plain, robust = pool.map(run, TOOLS)
    return plain, robust


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
    "one task's output, labelled": Case("-ln3 -o1 -e 1", WHO),
    "one task's output, another's error": Case("-n3 -o1 -e2", WHO),
    "one task's error": Case("-n3 -e 2", WHO),
    "job and step in the name": Case("-n2 -o %x-%u-%%-%t.txt", WHO, env={"SLURM_JOB_NAME": "j"}),
    "append": Case("-n2 --open-mode=append -o out.%t", WHO, files={"out.0": "old\n"}),
    "append, one file": Case("-n2 --open-mode=append -o all", WHO, files={"all": "old\n"}),
    "truncate": Case("-n2 --open-mode=truncate -o out.%t", WHO, files={"out.0": "old\n"}),
    "output in the environment": Case("-n2", WHO, env={"SLURM_STDOUTMODE": "o.%t"}),
    "stdin to all": Case("-n3", "sed s/^/$SLURM_PROCID:/", stdin=b"hi\nthere\n"),
    "stdin to task 1": Case("-n3 --input=1", "sed s/^/$SLURM_PROCID:/", stdin=b"hi\n"),
    "stdin from a file": Case("-n2 --input=in.txt", "cat", files={"in.txt": "from file\n"}),
    "no stdin": Case("-n2 --input=none", "cat; echo end", stdin=b"hi\n"),
    "exit code 3 of one": Case("-n3", FAIL.format(1, "exit 3"), 3, ONCE),
    "exit code 255": Case("-n1", "exit 255", 255, ONCE),
    "killed": Case("-n1", "kill -KILL $$", 137, ONCE),
    "segmentation fault": Case("-n1", "ulimit -c 0; kill -SEGV $$", 139, ONCE),
    "one of three aborted": Case(
        "-n3", "ulimit -c 0; " + FAIL.format(2, "kill -ABRT $$"), 134, ONCE
    ),
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
    argv = [*case.argv.split(), "/bin/bash", "-c", case.shell]  # --export=NONE leaves no PATH
    plain, robust = both(alloc, argv, case.env, case.stdin, case.files)
    assert plain.code == case.code, plain.err.decode()
    assert robust.code == plain.code, robust.err.decode()
    assert robust.out_lines == plain.out_lines
    assert robust.err_lines == plain.err_lines
    assert robust.files() == plain.files()


def test_command_not_found(alloc: Allocation) -> None:
    plain, robust = both(alloc, ["-n3", "no-such-command"])
    assert plain.code == robust.code == 2
    assert b"cannot run 'no-such-command'" in robust.err
    assert b"recovered" not in robust.err


def test_bytes_come_through_unharmed_and_in_order(alloc: Allocation) -> None:
    make = "import os,random; os.write(2,b'e\\xff\\n'); r=random.Random({}); w=os.fdopen(1,'wb')\n"
    make += "for _ in range(160): w.write(r.randbytes(65536))"
    plain, robust = both(alloc, ["-n1", "python", "-c", make.format(1)])
    assert len(plain.out) == 160 << 16
    assert robust.out == plain.out
    assert robust.err_lines == plain.err_lines
    # Lines of two ranks may mix, but each rank's stay in order, labelled or not.
    count = "for i in $(seq 5000); do echo $SLURM_PROCID $i; done"
    for options in ("-n2", "-ln2"):
        plain, robust = both(alloc, [*options.split(), "bash", "-c", count])
        assert sorted(robust.out.splitlines()) == sorted(plain.out.splitlines())
        for rank in (b"0", b"1"):
            words = [line.split() for line in robust.out.splitlines()]
            assert [int(w[-1]) for w in words if w[-2] == rank] == list(range(1, 5001))


# -- the ranks' environment -------------------------------------------------------------------

OURS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"),
    *("MASTER_PORT", "PYTHONPATH", "ROBUST_AUTO", "ROBUST_BEAT_DIR", "ROBUST_EPOCH"),
    *("ROBUST_JOB_ID", "ROBUST_RESTART_REASON"),
}
# Different in every step; and the task's pid, which is the shim's.
EACH_ITS_OWN = re.compile(
    r"SLURM_(STEP_?ID|SRUN_COMM_PORT|STEP_LAUNCHER_PORT|TASK_PID)|PWD|OLDPWD|_"
)
DUMP = (
    "import json,os,pathlib; "
    "pathlib.Path('env.'+os.environ['SLURM_PROCID']).write_text(json.dumps(dict(os.environ)))"
)


def environments(result: Result) -> dict[str, dict[str, str]]:
    found = {p.name: json.loads(p.read_text()) for p in result.cwd.glob("env.*")}
    for env in found.values():
        for name in [n for n in env if EACH_ITS_OWN.fullmatch(n)]:
            del env[name]
    return found


@pytest.mark.parametrize(
    "options",
    [
        "-N3 -n6 -l",
        "-N3 -n7 -m cyclic --job-name=mine",
        "-N2 --ntasks-per-node=2 -c2 --gres=gpu:h100:1",
        "-N2 -n2 --gpus-per-task=2",
        "-n2 --export=NONE",
    ],
)
def test_environment(alloc: Allocation, options: str) -> None:
    plain, robust = both(alloc, [*options.split(), sys.executable, "-c", DUMP])
    assert (plain.code, robust.code) == (0, 0), robust.err.decode()
    expected, found = environments(plain), environments(robust)
    assert found.keys() == expected.keys()
    for name, env in found.items():
        # The ranks' world is the step: of a step on a part of the job, job-wide values are its own.
        want = expected[name] | {
            "SLURM_JOB_NODELIST": expected[name]["SLURM_STEP_NODELIST"],
            "SLURM_NODELIST": expected[name]["SLURM_STEP_NODELIST"],
            "SLURM_JOB_NUM_NODES": expected[name]["SLURM_STEP_NUM_NODES"],
            "SLURM_NNODES": expected[name]["SLURM_STEP_NUM_NODES"],
        }
        assert {n: env.get(n) for n in want} == want
        assert env.keys() >= OURS
        assert env["RANK"] == env["SLURM_PROCID"]
        assert env["WORLD_SIZE"] == env["SLURM_NTASKS"]
        assert env.keys() - want.keys() - OURS <= {"SLURM_NTASKS_PER_NODE"}


def test_step_has_the_name_of_the_program(alloc: Allocation) -> None:
    cwd = alloc.directory("name")
    with alloc.start(["robust-srun", "-n1", "sleep", "100"], cwd) as process:
        step = alloc.step_of(process)
        done = alloc.lab.exec("head", ["squeue", "-h", "-s", "-o", "%i %j", "-j", str(alloc.job)])
        process.terminate()
    assert f"{step} sleep" in done.stdout.splitlines()


_LOOK = r"""
import os, pathlib, sys
hidden = ("ROBUST_STEP_KEY", "ROBUST_PORT", "ROBUST_COMPANION")
print("seen", [name for name in hidden if name in os.environ])
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words = path.read_bytes()
    except OSError:
        continue
    sys.stdout.buffer.write(b"cmdline " + words.replace(b"\0", b" ").replace(b"\n", b" ") + b"\n")
"""


def test_the_key_stands_nowhere(alloc: Allocation) -> None:
    cwd = alloc.directory("key")
    (cwd / "wait.sh").write_text("until [ -e end ]; do sleep 0.05; done\n")
    argv = ["robust-srun", "-n2", "--robust-verbose", "--robust-state-dir=state"]
    with alloc.start(
        [*argv, "bash", "wait.sh"], cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        alloc.step_of(process)
        look = "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep ^ROBUST_STEP_KEY="
        held: list[str] = []

        def found() -> bool:  # root sees the environment that srun and the shims were given
            held[:] = alloc.lab.exec("n1", ["bash", "-c", look], user=False).stdout.split()
            return bool(held)

        eventually(found)
        (cwd / "end").touch()
        said = process.communicate(timeout=DEADLINE)[0]
    keys = {line.partition("=")[2] for line in held}
    assert len(keys) == 1
    key = keys.pop().encode()
    assert len(key) >= 32
    assert key not in said
    files = [p for p in alloc.lab.shared.rglob("*") if p.is_file()]
    files += [p for p in (alloc.lab.spec.dir / "log").iterdir() if p.is_file()]
    assert not [p for p in files if key in p.read_bytes()]
    robust = alloc.run(["robust-srun", "-n2", "python", "-c", _LOOK], alloc.directory("look"))
    assert [x for x in robust.out_lines if x.startswith(b"seen")] == [b"seen []"] * 2
    assert b"srun_wrapper.task" in robust.out  # the shims' own command lines were among them
    assert not re.search(rb"[0-9a-f]{64}", robust.out)


# -- signals ----------------------------------------------------------------------------------

_COUNT = """
import os, signal, time
rank = os.environ["SLURM_PROCID"]
def got(number, frame):
    with open("got." + rank, "a") as file:
        print(signal.Signals(number).name, file=file)
for name in ("INT", "TERM", "USR1", "USR2", "HUP", "QUIT", "ALRM"):
    signal.signal(getattr(signal, "SIG" + name), got)
with open("ready." + rank, "w"):
    pass
end = time.monotonic() + 300
while not os.path.exists("end") and time.monotonic() < end:
    time.sleep(0.02)
"""


def counted(alloc: Allocation, tool: str, send: Callable[..., None]) -> tuple[int, list[str]]:
    """Exit code of the tool, and all signals that each of 3 ranks got."""
    cwd = alloc.directory(tool)
    argv = [tool, "-n3", "--robust-max-restarts=0"] if tool != "srun" else [tool, "-n3"]
    with alloc.start([*argv, "python", "-c", _COUNT], cwd) as process:
        eventually(lambda: len(list(cwd.glob("ready.*"))) == 3)
        send(process, alloc.step_of(process))
        eventually(lambda: len(list(cwd.glob("got.*"))) == 3)
        time.sleep(0.3)  # for a second copy, if there is one
        (cwd / "end").touch()
        code = process.wait(DEADLINE)
    return code, [path.read_text().strip() for path in sorted(cwd.glob("got.*"))]


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_signal_to_the_launcher_reaches_every_rank_once(alloc: Allocation, name: str) -> None:
    number = getattr(signal, f"SIG{name}")
    found = [counted(alloc, tool, lambda p, _s: p.send_signal(number)) for tool in TOOLS]
    assert found[1] == found[0]
    assert found[1][1] == [f"SIG{name}"] * 3


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT"])
def test_last_words(alloc: Allocation, name: str) -> None:
    """srun kills the ranks at once, or at the second Ctrl-C; here they are told, and may save."""
    number = getattr(signal, f"SIG{name}")
    code, got = counted(alloc, TOOLS[1], lambda p, _s: p.send_signal(number))
    assert code == 0
    assert got == [f"SIG{name}"] * 3


@pytest.mark.parametrize("name", ["USR2", "TERM", "INT"])
def test_scancel_signal_reaches_every_rank_once(alloc: Allocation, name: str) -> None:
    def send(_process: object, step: str) -> None:
        alloc.lab.exec("head", ["scancel", "-s", name, step], check=True)

    found = [counted(alloc, tool, send) for tool in TOOLS]
    assert found[1] == found[0]
    assert found[1][1] == [f"SIG{name}"] * 3


def ended(alloc: Allocation, tool: str, send: Callable[["subprocess.Popen[bytes]"], object]) -> int:
    cwd = alloc.directory(tool)
    # Slurm tells the whole process tree of a task, so the shell must not wait for a child.
    shell = "touch ready.$SLURM_PROCID; exec sleep 100"
    with alloc.start([tool, "-n3", "bash", "-c", shell], cwd) as process:
        eventually(lambda: len(list(cwd.glob("ready.*"))) == 3)
        send(process)
        return process.wait(DEADLINE)


@pytest.mark.parametrize("signals", [["USR1"], ["INT"] * 2, ["TERM"], ["HUP"]], ids=" ".join)
def test_exit_code_after_signals_to_the_launcher(alloc: Allocation, signals: list[str]) -> None:
    def send(process: "subprocess.Popen[bytes]") -> None:
        for name in signals:
            process.send_signal(getattr(signal, f"SIG{name}"))
            time.sleep(0.2 * (len(signals) > 1))

    plain, robust = [ended(alloc, tool, send) for tool in TOOLS]
    number = int(getattr(signal, f"SIG{signals[0]}"))
    assert robust == 128 + number
    assert plain in (robust, 128 + signal.SIGKILL)  # srun kills where we pass the signal on


@pytest.mark.parametrize("options", [[], ["-s", "TERM"], ["-s", "USR2"], ["-s", "KILL"]], ids=str)
def test_exit_code_of_a_cancelled_step(alloc: Allocation, options: list[str]) -> None:
    def cancel(process: "subprocess.Popen[bytes]") -> None:
        step = alloc.step_of(process)
        alloc.lab.exec("head", ["scancel", *options, step], check=True)

    codes = [ended(alloc, tool, cancel) for tool in TOOLS]
    assert codes[1] == codes[0] != 0
    assert alloc.lab.job(alloc.job)["JobState"] == "RUNNING"  # not put back in the queue


@pytest.mark.parametrize("options", [[], ["-s", "TERM"]], ids=str)
def test_step_cancelled_after_a_swap_stays_cancelled(
    new_lab: LabFactory, options: list[str]
) -> None:
    """The companion's step is another one to Slurm: it ends with the first."""
    lab = new_lab(nodes=2, standby=1)
    training = start(lab, 2, steps=3000)
    training.wait_step(5)
    lab.crash("n2")
    training.until(lambda: training.incidents(), "the recovery")
    lab.exec("head", ["scancel", *options, f"{training.job}.0"], check=True)
    assert training.wait_end(20) == 128 + (signal.SIGTERM if options else signal.SIGKILL)
    assert lab.job(training.job)["JobState"] == "FAILED"  # of that code, not put back
    assert len(training.incidents()) == 1
    training.check_gone()
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "the companion has gone home")


def test_second_interrupt_ends_ranks_that_ignore_it(alloc: Allocation) -> None:
    stubborn = "trap : INT TERM; touch ready.$SLURM_PROCID; while :; do sleep 0.1; done"
    cwd = alloc.directory("stubborn")
    with alloc.start(["robust-srun", "-n3", "bash", "-c", stubborn], cwd) as process:
        eventually(lambda: len(list(cwd.glob("ready.*"))) == 3)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert process.wait(DEADLINE) in (128 + signal.SIGINT, 128 + signal.SIGKILL)


# -- the rest ---------------------------------------------------------------------------------


def test_multi_prog_is_refused(alloc: Allocation) -> None:
    cwd = alloc.directory("multi")
    (cwd / "conf").write_text("0 echo a\n1 echo b\n")
    for argv, env in ((["--multi-prog"], {}), ([], {"SLURM_SRUN_MULTI": "1"})):
        robust = alloc.run(["robust-srun", "-n2", *argv, "conf"], cwd, env)
        assert robust.code == 2
        assert b"--multi-prog is not supported" in robust.err


@pytest.mark.parametrize("word", ["--help", "--usage", "--version", "-V", "--mpi=list"])
def test_information_is_sruns_own(alloc: Allocation, word: str) -> None:
    plain, robust = both(alloc, [word])
    assert (robust.code, robust.out, robust.err) == (plain.code, plain.out, plain.err)


def test_pty(alloc: Allocation) -> None:
    seen = []
    for tool in TOOLS:
        shell = "read x; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo tty $x $TERM; stty size; exit 7"
        leader, follower = pty.openpty()
        argv = [tool, "--pty", "-n1", "bash", "-c", shell]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
        env = ONCE | {"TERM": "vt100"}
        with alloc.start(argv, alloc.directory(tool), env, **streams) as process:
            os.close(follower)
            os.write(leader, b"hello\n")
            said = b""
            deadline = time.monotonic() + DEADLINE
            while time.monotonic() < deadline:
                try:
                    more = os.read(leader, 4096)
                except OSError:  # all have closed it
                    break
                said += more
            os.close(leader)
            seen.append((process.wait(DEADLINE), b"tty hello vt100" in said))
    assert seen == [(7, True)] * 2


def test_in_a_real_batch_script(lab: Cluster, alloc: Allocation) -> None:
    del alloc
    codes = []
    for tool in TOOLS:
        script = f"#!/bin/bash\n#SBATCH --no-kill\n{tool} -l bash -c '{WHO}'\nexit $(( $? + 5 ))\n"
        job = lab.sbatch(script, ["-N1", "-n2", "--overcommit", "-o", f"batch.{tool}", "-s"])
        record = lab.wait_job(job, {"FAILED", "COMPLETED"})
        text = (lab.shared / f"batch.{tool}").read_text()
        codes.append((record["ExitCode"], sorted(text.splitlines())))
    assert codes[1] == codes[0]


def test_time_limit(lab: Cluster, timed: dict[str, tuple[int, Path]]) -> None:
    """The ranks get Slurm's SIGTERM once, then its SIGKILL; nothing is restarted."""
    seen = []
    for job, cwd in timed.values():
        record = lab.wait_job(job, {"TIMEOUT", "COMPLETED", "FAILED", "CANCELLED"}, 150)
        # Slurm ends the batch script by SIGTERM too, so what runs in it may pass on a second one.
        got = [set(path.read_text().split()) for path in sorted(cwd.glob("got.*"))]
        seen.append((record["JobState"], record["Restarts"], got))
    assert seen == [("TIMEOUT", "0", [{"SIGTERM"}] * 2)] * 2
    cwd = timed[TOOLS[1]][1]
    assert not list(cwd.glob("state/jobs/*/incidents.jsonl"))
