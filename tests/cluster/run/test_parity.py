"""robust-srun beside srun in one allocation: the same output, files, environment and exit code."""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from allocation import DEADLINE, TOOLS, Allocation, Result, allocate, both, parity_lab
from waiting import until

from lab import Cluster


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with parity_lab() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alloc(lab: Cluster) -> Allocation:
    return allocate(lab)


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
# One task fails while the others run, once all have begun.
HAVE_BEGUN = (
    "touch b$SLURM_PROCID; until [ -e b0 ] && [ -e b1 ] && [ -e b2 ]; do sleep .1; done; "
    "[ $SLURM_PROCID = 1 ] && {0}; sleep 4"
)
# Each writes once, also those that run when task 1 fails, and none is told of a world of ranks.
ALONE = (
    "echo start; env | grep -E '^((LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_[A-Z]*)='; "
    "[ $SLURM_PROCID = 1 ] && exit 3; sleep 2; echo end"
)

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
    "output and error to files named by numbers": Case("-n3 --output=3 -e 99", WHO),
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
    "stdin from a file named by a number": Case("-n2 -i 2", "cat", files={"2": "from file\n"}),
    "no stdin": Case("-n2 --input=none", "cat; echo end", stdin=b"hi\n"),
    "exit code 3 of one": Case("-n3", FAIL.format(1, "exit 3"), 3, ONCE),
    "exit code 255": Case("-n1", "exit 255", 255, ONCE),
    "killed": Case("-n1", "kill -KILL $$", 137, ONCE),
    "segmentation fault": Case("-n1", "ulimit -c 0; kill -SEGV $$", 139, ONCE),
    "one of three aborted": Case(
        "-n3", "ulimit -c 0; " + FAIL.format(2, "kill -ABRT $$"), 134, ONCE
    ),
    "others end with one": Case("-n3 -K", HAVE_BEGUN.format("exit 3"), 143, ONCE),
    "others stay with one": Case("-n3 -K0", HAVE_BEGUN.format("exit 3"), 3, ONCE),
    "others end with one by environment": Case(
        "-n3", HAVE_BEGUN.format("exit 3"), 143, ONCE | {"SLURM_KILL_BAD_EXIT": "1"}
    ),
    "independent tasks": Case("-n4", ALONE, 3, {"ROBUST_RANK_ENV": "no"}),
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
    if name == "output per task, error to srun" and alloc.lab.spec.slurm == "26.05":
        pytest.skip("srun 26.05 writes the errors into the output's files all the same")
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
    # Lines of two ranks may mix, but each rank's stay in order, labelled or not. And all of them
    # come: on a busy machine plain srun was seen to lose the last ones (22.05): no measure.
    count = "for i in $(seq 5000); do echo $SLURM_PROCID $i; done"
    for options, label in (("-n2", ""), ("-ln2", "{0}: ")):
        _, robust = both(alloc, [*options.split(), "bash", "-c", count])
        lines = robust.out.decode().splitlines()
        for rank in range(2):
            head = f"{label.format(rank)}{rank} "
            wanted = [f"{head}{number}" for number in range(1, 5001)]
            assert [line for line in lines if line.startswith(head)] == wanted
        assert len(lines) == 10000


@pytest.mark.parametrize(
    ("umask", "kept"), [("0777", b"0077"), ("0277", b"0077"), ("0027", b"0027")]
)
def test_a_umask_that_denies_the_user_its_own_files(
    alloc: Allocation, umask: str, kept: bytes
) -> None:
    """The job ends well as under srun; of the umask only the bits that deny the owner go."""
    argv = ["sh", "-c", f'umask {umask}; exec robust-srun -n3 sh -c "$1"', "sh", f"umask; {WHO}"]
    done = alloc.run(argv, alloc.directory("robust-srun"))
    assert done.code == 0, done.err.decode()
    assert done.out_lines.count(kept) == 3 and len(done.out_lines) == 6
    said = f"umask {umask} denies you the files that you create, so robust-srun and the ranks run"
    assert (said in done.err.decode()) is (umask != kept.decode())


# -- the ranks' environment -------------------------------------------------------------------

OURS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR"),
    *("MASTER_PORT", "PYTHONPATH", "ROBUST_AUTO", "ROBUST_BEAT_DIR", "ROBUST_EPOCH", "ROBUST_SHIM"),
    *("ROBUST_JOB_ID", "ROBUST_RESTART_REASON", "ROBUST_RUN_ID", "ROBUST_CKPT_SOCKET"),
    *("ROBUST_LEARN", "ROBUST_TORCHRUN_BROKER", "ROBUST_LAUNCHER_IMPORTS"),
    *("ROBUST_CHECKPOINT_DIR", "ROBUST_CHECKPOINT_EVERY", "ROBUST_CHECKPOINT_MINUTES"),
    *("ROBUST_CHECKPOINT_KEEP", "ROBUST_NAN", "TORCHELASTIC_ERROR_FILE"),
    *("APPTAINER_BINDPATH", "SINGULARITY_BINDPATH"),
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
        # Data processes read for one another from three nodes on.
        ours = OURS | {"ROBUST_DATA_NODES"} if int(env["SLURM_NNODES"]) > 2 else OURS
        assert env.keys() >= ours
        assert env["RANK"] == env["SLURM_PROCID"]
        assert env["WORLD_SIZE"] == env["SLURM_NTASKS"]
        assert env.keys() - want.keys() - ours <= {"SLURM_NTASKS_PER_NODE"}


def test_step_has_the_name_of_the_program(alloc: Allocation) -> None:
    cwd = alloc.directory("name")
    with alloc.start(["robust-srun", "-n1", "sleep", "100"], cwd) as process:
        step = alloc.step_of(process)
        done = alloc.lab.exec("head", ["squeue", "-h", "-s", "-o", "%i %j", "-j", str(alloc.job)])
        process.terminate()
    assert f"{step} sleep" in done.stdout.splitlines()


_LOOK = r"""
import os, pathlib, sys
hidden = ("ROBUST_STEP_KEY", "ROBUST_PORT", "ROBUST_STANDBY_REQUEST")
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

        until(found, "the key in the environment", DEADLINE)
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
    assert b"srun_wrapper.agent.task" in robust.out  # the shims' own command lines were among them
    assert not re.search(rb"[0-9a-f]{64}", robust.out)


# -- the rest ---------------------------------------------------------------------------------


def test_multi_prog_is_refused(alloc: Allocation) -> None:
    cwd = alloc.directory("multi")
    (cwd / "conf").write_text("0 echo a\n1 echo b\n")
    for argv, env in ((["--multi-prog"], {}), ([], {"SLURM_SRUN_MULTI": "1"})):
        robust = alloc.run(["robust-srun", "-n2", *argv, "conf"], cwd, env)
        assert robust.code == 2
        assert b"--multi-prog is not supported" in robust.err


def test_information_is_sruns_own(alloc: Allocation) -> None:
    plain, robust = both(alloc, ["--mpi=list"])
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
