"""robust-srun's command line: what it takes over from srun, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from robust_slurm import commands
from robust_slurm.config import FIELDS, Config, flag, flags, load
from robust_slurm.state_dir.supervisor_lock import running_beside
from srun_wrapper import cli
from srun_wrapper.cli import check_regex, take_output
from srun_wrapper.command.batch_script import has_no_kill
from srun_wrapper.command.layout import allocation
from srun_wrapper.command.srun_options import UsageError, split
from srun_wrapper.command.step_request import effective
from srun_wrapper.protocol.task_options import OutputPlan

pytestmark = pytest.mark.slow

Taken = tuple[list[str], dict[str, str], OutputPlan, tuple[str, ...]]


def take(*words: str, **env: str) -> Taken:
    command = split([*words, "python", "train.py"], flags())
    rest, kept, plan, standby_output = take_output(command, effective(command, env), env)
    return rest.argv(), kept, plan, standby_output


@pytest.mark.parametrize(
    ("words", "left", "plan", "standby_output"),
    [
        (("-N2",), ["-N2"], OutputPlan(), ()),
        (("-l",), [], OutputPlan(label=True), ()),
        (("-lu",), ["-u"], OutputPlan(label=True, unbuffered=True), ()),
        (
            ("--output=log.%j",),
            ["--output=log.%j"],
            OutputPlan(),
            ("--output=log.%j", "--open-mode=append"),
        ),
        (
            ("-o", "log", "-e", "err"),
            ["-o", "log", "-e", "err"],
            OutputPlan(),
            ("--output=log", "--open-mode=append", "--error=err", "--open-mode=append"),
        ),
        (("-o", "log-%t"), [], OutputPlan(out="log-%t", err="log-%t"), ()),
        (
            ("-o", "log-%t", "-e", "err"),
            ["-e", "err"],
            OutputPlan(out="log-%t"),
            ("--error=err", "--open-mode=append"),
        ),
        (("-e", "err-%N"), [], OutputPlan(err="err-%N"), ()),
        (("--output=3",), [], OutputPlan(only_out=3, only_err=3), ()),
        (("--output=3", "-e", "e-%t"), [], OutputPlan(only_out=3, err="e-%t"), ()),
        (
            ("--output=none",),
            ["--output=none"],
            OutputPlan(),
            ("--output=none", "--open-mode=append"),
        ),
        (
            ("-o", "%t", "--open-mode=append"),
            ["--open-mode=append"],
            OutputPlan(out="%t", err="%t", append=True),
            (),
        ),
        (("--pty", "-l", "-o", "x-%t"), ["--pty", "-l", "-o", "x-%t"], OutputPlan(), ()),
    ],
)
def test_take_output(
    words: tuple[str, ...], left: list[str], plan: OutputPlan, standby_output: tuple[str, ...]
) -> None:
    assert take(*words) == (left, {}, plan, standby_output)


@pytest.mark.parametrize(
    ("env", "plan", "gone"),
    [
        ({"SLURM_LABELIO": "1"}, OutputPlan(label=True), {"SLURM_LABELIO"}),
        ({"SLURM_STDOUTMODE": "o-%t"}, OutputPlan(out="o-%t", err="o-%t"), {"SLURM_STDOUTMODE"}),
        # Newer names of the same: left there, srun would open the files as well.
        ({"SRUN_OUTPUT": "o-%t"}, OutputPlan(out="o-%t", err="o-%t"), {"SRUN_OUTPUT"}),
        ({"SRUN_ERROR": "e-%t"}, OutputPlan(err="e-%t"), {"SRUN_ERROR"}),
        (
            {"SRUN_ERROR": "e-%t", "SLURM_STDERRMODE": "x"},
            OutputPlan(err="e-%t"),
            {"SRUN_ERROR", "SLURM_STDERRMODE"},
        ),
        ({"SLURM_STDOUTMODE": "plain", "HOME": "/h"}, OutputPlan(), set()),
        ({"SLURM_LABELIO": "0"}, OutputPlan(), set()),
    ],
)
def test_output_from_the_environment(env: dict[str, str], plan: OutputPlan, gone: set[str]) -> None:
    _, kept, taken, _ = take(**env)
    assert taken == plan
    assert kept == {name: value for name, value in env.items() if name not in gone}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("#SBATCH --no-kill", True),
        ("#SBATCH --no-kill\r", True),
        ("#SBATCH -k", True),
        ("#SBATCH -N 4 --no-kill -t 10", True),
        ("#SBATCH\t-N4\t-k", True),
        ("#SBATCH -Hk", True),
        ("#SBATCH --no-kill # keep it", True),
        ("#SBATCH --no-kill=off", False),
        ("#SBATCH --no-killing", False),
        ("#SBATCH -Jbenchmark", False),
        ("#SBATCH -J my-k", False),
        ("#SBATCH -p trunk", False),
        ("##SBATCH --no-kill", False),
        ("# SBATCH --no-kill", False),
        ("srun --no-kill x", False),
        ("#SBATCH -N 4\n--no-kill", False),
        ("", False),
    ],
)
def test_has_no_kill(line: str, found: bool) -> None:
    script = f"#!/bin/sh\n#SBATCH -t 5\n{line}\necho hi\n"
    assert has_no_kill(script, {}) is found
    assert has_no_kill(script, {"SBATCH_NO_KILL": ""})


def test_allocation() -> None:
    assert allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}) == 4
    assert allocation({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}) == 2


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, r"no allocation: .*sbatch script or after salloc"),
        ({"SLURM_NNODES": "2"}, "SLURM_JOB_ID is not set"),
        ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_NUM_NODES is not set, though SLURM_JOB_ID is"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "two"}, "NUM_NODES='two' is not a number"),
        ({"SLURM_JOB_ID": "x", "SLURM_NNODES": "2"}, "SLURM_JOB_ID='x' is not a job id"),
    ],
)
def test_no_allocation_names_the_variable_that_is_wrong(env: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        allocation(env)


@pytest.mark.parametrize("regex", ["(", "step (?P<step", r"\u00e9", "\udcff"])
def test_bad_regex(regex: str) -> None:
    with pytest.raises(UsageError, match="--robust-progress-regex="):
        check_regex(Config(progress_regex=regex))
    check_regex(Config(progress_regex=r"step (?P<step>\d+) é"))


class Shell:
    """Runs the command in an environment of its own, with an srun that must not be reached."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.bin = base / "bin"
        self.bin.mkdir()
        srun = self.bin / "srun"
        srun.write_text('#!/bin/sh\necho "srun got: $*"\n')
        srun.chmod(0o755)
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(base),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NNODES": "2",
            "ROBUST_STATE_DIR": str(base / "state"),
        }

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        full = {k: v for k, v in (self.env | env).items() if v != "UNSET"}
        return subprocess.run(
            [sys.executable, *commands.words("srun_wrapper.cli"), *words],
            env=full,
            cwd=self.base,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize(
    ("words", "env", "says"),
    [
        (("hostname",), {"SLURM_JOB_ID": "UNSET"}, "no allocation"),
        (("--robust-spare=1", "hostname"), {}, "did you mean --robust-spares?"),
        (("--robust-nonsense", "hostname"), {}, "--robust-help lists all"),
        (("--robust-spares=2", "hostname"), {}, "leaves no node to run on"),
        (("--robust-spares=x", "hostname"), {}, "spares = 'x'"),
        (("--robust-spares",), {}, "--robust-spares needs a value"),
        (("--robust-progress-regex=(", "hostname"), {}, "--robust-progress-regex='('"),
        (("hostname",), {"PATH": "/nowhere"}, "srun is not on PATH"),
        (("hostname",), {"ROBUST_REQUEUE": "perhaps"}, "environment ROBUST_REQUEUE"),
        (("-N2",), {}, "no command given"),
        ((), {}, "no command given"),
    ],
)
def test_bad_input_is_code_2_and_one_clear_line(
    shell: Shell, words: tuple[str, ...], env: dict[str, str], says: str
) -> None:
    done = shell(*words, **env)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("robust-srun: error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_words_that_are_no_text(shell: Shell) -> None:
    done = subprocess.run(
        [sys.executable, *commands.words("srun_wrapper.cli"), b"--robust-\xff", b"x"],
        env={os.fsencode(k): os.fsencode(v) for k, v in shell.env.items()},
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert b"unknown option --robust-" in done.stderr and b"Traceback" not in done.stderr


def test_help_needs_neither_slurm_nor_a_job(shell: Shell) -> None:
    done = shell("--robust-help", PATH="/nowhere", SLURM_JOB_ID="UNSET")
    assert done.returncode == 0 and done.stderr == ""
    for name, f in FIELDS.items():
        assert flag("no_" + name if f.default is True else name) in done.stdout
    assert done.stdout.count("[default: ") == len(FIELDS)
    for code in ("120", "121", "122"):
        assert code in done.stdout


@pytest.mark.parametrize("word", ["--help", "-h", "--usage", "--hel"])
@pytest.mark.parametrize("path", [None, "/nowhere"], ids=["slurm", "no slurm"])
def test_help_is_our_own(shell: Shell, word: str, path: str | None) -> None:
    env = {"SLURM_JOB_ID": "UNSET"} | ({"PATH": path} if path else {})
    done = shell(word, **env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shell("--robust-help", **env).stdout
    assert "srun --help" in done.stdout


@pytest.mark.parametrize("word", ["--version", "-V"])
@pytest.mark.parametrize(
    ("srun", "says"),
    [
        ("echo slurm-wlm 22.05.8", "Slurm 22.05.8"),
        ("echo slurm 26.05.5", "Slurm 26.05.5"),
        ("echo 'srun: error: resolve_ctls_from_dns_srv' >&2; exit 1", "srun --version fails here"),
        (None, "no Slurm: srun is not on PATH"),
    ],
)
def test_version_is_our_own(
    shell: Shell, tmp_path: Path, word: str, srun: str | None, says: str
) -> None:
    """srun needs a configuration to say its version: without one it prints errors only."""
    there = tmp_path / "bin of srun"
    there.mkdir()
    if srun is not None:
        (there / "srun").write_text(f"#!/bin/sh\n{srun}\n")
        (there / "srun").chmod(0o755)
    done = shell(word, PATH=str(there), SLURM_JOB_ID="UNSET")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"robust-srun \S+ \(.*{re.escape(says)}\)\n", done.stdout), done.stdout


def test_the_rules_are_printed_without_slurm_and_a_job(shell: Shell) -> None:
    done = shell(
        "--robust-explain", "--robust-max-restarts=8", PATH="/nowhere", SLURM_JOB_ID="UNSET"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "machine-error" in done.stdout and "max_restarts = 8\n" in done.stdout
    assert shell("--robust-explain", "--robust-spares=x", SLURM_JOB_ID="UNSET").returncode == 2


def test_sruns_own_help_is_sruns(shell: Shell) -> None:
    done = shell("--mpi=list", "-N2", SLURM_JOB_ID="UNSET")
    assert (done.returncode, done.stdout) == (0, "srun got: --mpi=list -N2\n")


def test_a_second_one_beside_it_says_so(shell: Shell) -> None:
    directory = shell.base / "state" / "jobs" / "7"
    directory.mkdir(parents=True)
    assert running_beside(directory, "") == ""
    done = shell("hostname")
    beside = f"another robust-srun of this job is running (process {os.getpid()} on "
    assert done.stderr.count(f"robust-srun: warning: {beside}") == 1, done.stderr
    for env in ({"ROBUST_MODE": "observe"}, {"ROBUST_BY_PLUGIN": f"full:{shell.bin}/srun"}):
        done = shell("-N2", "hostname", **env)
        assert (done.returncode, done.stdout) == (0, "srun got: -N2 hostname\n")
        assert "this line runs as plain srun: another robust-srun" in done.stderr
    other = [sys.executable, "-c", BESIDE, str(directory)]
    assert subprocess.run(other, timeout=60, check=False).returncode == 0, "gone with its process"


BESIDE = """
import os, sys
from pathlib import Path
from robust_slurm.state_dir.supervisor_lock import running_beside

where = Path(sys.argv[1])
assert running_beside(where, "")
write, os.write = os.write, None
def full(*_):
    raise OSError(28, "No space left on device")
os.write = full
assert running_beside(where, "2") == ""
os.write = write
pid = os.fork()
if pid == 0:
    os._exit(running_beside(where, "1") != "" or running_beside(where, "2") == "")
assert os.waitpid(pid, 0)[1] == 0
assert running_beside(where, "1") == ""  # the job's next start, and that process is gone
assert running_beside(Path("/proc/nowhere"), "9") == ""
"""


@pytest.mark.parametrize("kind", ["file", "nowhere"])
def test_a_state_directory_that_cannot_be_used_stops_no_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    state = {"file": tmp_path / "state", "nowhere": Path("/proc/nowhere")}[kind]
    (tmp_path / "state").write_text("")
    config = load({"robust-state-dir": str(state)}, {}, tmp_path, tmp_path / "none")
    assert cli.prepared(config, 7) is None
    told = capfd.readouterr().err
    assert told.startswith(f"robust-srun: warning: cannot write {state}/jobs/7: ")
    assert "the job runs without records" in told and told.count("\n") == 1


LATE = """
import asyncio, os, signal, sys
from srun_wrapper import cli

class Ended:
    def __init__(self, *args): pass
    async def run(self): return 7

cli.Supervisor = Ended
code = asyncio.run(cli.supervise(None, None))
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
sys.exit(code)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGQUIT"])
def test_a_signal_after_the_end_changes_nothing(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE, name], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")
