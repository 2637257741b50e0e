"""The lab against the real thing: Slurm's daemons, namespaces, faults, and what they leave."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab import Cluster, Lab, LabError, host

REPOSITORY = Path(__file__).resolve().parents[2]


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


def eventually(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with Cluster(nodes=4, standby=1, gpus=2) as cluster:
        yield cluster


def hostnames(lab: Lab, nodes: int) -> list[str]:
    done = lab.exec("head", ["srun", f"-N{nodes}", "hostname"], timeout=60, check=True)
    return sorted(done.stdout.split())


# -- what it is -------------------------------------------------------------------------------


def test_user_runs_on_all_train_nodes(lab: Cluster) -> None:
    assert hostnames(lab, 4) == ["n1", "n2", "n3", "n4"]
    assert set(lab.nodes()) == {"n1", "n2", "n3", "n4", "s1"}
    done = lab.exec("head", ["srun", "-p", "standby", "id", "-un"], check=True)
    assert done.stdout.strip() == lab.user


def test_gres_gives_devices(lab: Cluster) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES"
    argv = ["srun", "-N2", "--gres=gpu:h100:2", "bash", "-c", show]
    assert lab.exec("head", argv, check=True).stdout.split() == ["0,1", "0,1"]


def test_each_node_has_its_own_everything(lab: Cluster) -> None:
    for node in ("n1", "n2"):
        make = 'for d in /tmp /dev/shm; do echo "$0" > $d/mine; done; cat /tmp/mine /dev/shm/mine'
        assert lab.exec(node, ["bash", "-c", make, node]).stdout.split() == [node, node]
        assert lab.exec(node, ["hostname"]).stdout.strip() == node
        pids = lab.exec(node, ["bash", "-c", "cd /proc && echo [0-9]*"]).stdout.split()
        assert len(pids) < 10
    assert lab.exec("n1", ["hostname", "-i"]).stdout.strip() == "10.77.0.1"
    (lab.shared / "note").write_text("seen")
    assert lab.exec("n4", ["cat", str(lab.shared / "note")]).stdout == "seen"


def test_exec_is_transparent(lab: Cluster) -> None:
    assert lab.exec("n1", ["cat"], input="in and out").stdout == "in and out"
    assert lab.exec("n1", ["bash", "-c", "exit 7"]).returncode == 7
    assert lab.exec("n1", ["bash", "-c", "kill -USR1 $$"]).returncode == -signal.SIGUSR1
    assert lab.exec("n1", ["no-such-command"]).returncode == 127
    assert lab.exec("n1", ["/etc/passwd"]).returncode == 126
    assert lab.exec("n1", ["id", "-u"], user=False).stdout.strip() == "0"
    assert lab.exec("n1", ["bash", "-c", "echo $A"], env={"A": "b"}).stdout.strip() == "b"
    with pytest.raises(LabError, match="head n1 n2 n3 n4 s1"):
        lab.exec("n9", ["true"])


def test_signals_pass_to_the_command(lab: Cluster) -> None:
    script = "trap 'echo got; exit 5' TERM; echo on; while :; do sleep 0.05; done"
    with lab.popen("n1", ["bash", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "got\n"
        assert process.wait(10) == 5


def test_batch_job(lab: Cluster) -> None:
    job = lab.sbatch("#!/bin/sh\nhostname\n", ["-o", "batch.out"])
    assert lab.wait_job(job, "COMPLETED", 30)["Partition"] == "train"
    assert (lab.shared / "batch.out").read_text() == "n1\n"


_ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(x)
print(x.item(), flush=True)
dist.destroy_process_group()
"""


def test_gloo_between_nodes_without_tuning(lab: Cluster) -> None:
    pytest.importorskip("torch")
    (lab.shared / "reduce.py").write_text(_ALL_REDUCE)
    run = (
        "export MASTER_ADDR=n1 MASTER_PORT=29500 RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS; "
        "python reduce.py"
    )
    argv = ["srun", "-N2", "-w", "n1,n2", "bash", "-c", run]
    assert lab.exec("head", argv, check=True, timeout=120).stdout.split() == ["3.0", "3.0"]


# -- faults -----------------------------------------------------------------------------------


def test_crash_takes_all_at_once_and_lets_no_farewell_out(lab: Cluster) -> None:
    listen = "import socket; s=socket.create_server(('', 5000)); c,_=s.accept(); c.recv(1)"
    dial = (
        "import socket,sys\ns=socket.create_connection(('n2',5000)); print('on',flush=True)\n"
        "s.settimeout(2)\ntry: print('farewell', s.recv(1))\nexcept TimeoutError: print('silence')"
    )
    with lab.popen("n2", ["python", "-c", listen]) as server:
        eventually(lambda: ":1388 " in lab.exec("n2", ["cat", "/proc/net/tcp"]).stdout)
        with lab.popen("n1", ["python", "-c", dial], stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "on\n"
            lab.exec("n2", ["touch", "/tmp/old", "/dev/shm/old"])
            before = time.time()
            at = lab.crash("n2")
            assert before <= at <= time.time()
            assert server.wait(1) == -signal.SIGKILL
            assert client.stdout.readline() == "silence\n"
    assert lab.faults()["n2"] == "crashed"
    assert lab.exec("n2", ["true"]).returncode == 125
    with pytest.raises(LabError, match="crashed already"):
        lab.crash("n2")
    lab.heal("n2")
    # The clone itself may lie below /tmp and is shown there.
    assert "old" not in lab.exec("n2", ["ls", "-A", "/tmp", "/dev/shm"]).stdout.split()
    assert hostnames(lab, 4) == ["n1", "n2", "n3", "n4"]


def test_crash_right_after_a_job_does_not_block_the_node(lab: Cluster) -> None:
    for _ in range(2):
        assert len(hostnames(lab, 4)) == 4
        lab.crash("n3")
        lab.heal("n3")
    assert len(hostnames(lab, 4)) == 4


def test_job_that_lost_its_node_is_requeued_after_the_heal(lab: Cluster) -> None:
    job = lab.sbatch("#!/bin/sh\nsleep 600\n", ["-w", "n4", "--requeue"])
    lab.wait_job(job, "RUNNING")
    lab.crash("n4")
    lab.heal("n4")
    assert lab.wait_job(job, "PENDING", 30)["Restarts"] == "1"
    lab.exec("head", ["scancel", str(job)], check=True)


def test_drained_node_stays_drained_through_crash_and_heal(lab: Cluster) -> None:
    drain = ["scontrol", "update", "nodename=n3", "state=drain", "reason=mine"]
    lab.exec("head", drain, user=False, check=True)
    try:
        lab.crash("n3")
        lab.heal("n3")
        assert "DRAIN" in lab.nodes()["n3"]
        assert lab.node_records()["n3"]["Reason"].startswith("mine")
    finally:
        resume = ["scontrol", "update", "nodename=n3", "state=resume"]
        lab.exec("head", resume, user=False, check=True)
    eventually(lambda: lab.nodes()["n3"] == {"IDLE"})


_TICK = "while :; do date +%s%N > /tmp/tick; sleep 0.02; done"


def tick(lab: Lab, node: str) -> str:
    return lab.exec(node, ["cat", "/tmp/tick"]).stdout


def test_hang_stops_all_and_heal_goes_on(lab: Cluster) -> None:
    with lab.popen("n2", ["bash", "-c", _TICK]) as ticker:
        eventually(lambda: tick(lab, "n2") != "")
        lab.hang("n2")
        assert lab.faults()["n2"] == "hung"
        seen = tick(lab, "n2")
        with pytest.raises(AssertionError):
            eventually(lambda: tick(lab, "n2") != seen, 0.5)
        lab.heal("n2")
        eventually(lambda: tick(lab, "n2") != seen)
        ticker.terminate()
    assert lab.faults()["n2"] == "up"
    assert len(hostnames(lab, 4)) == 4


def test_hang_of_one_rank(lab: Cluster) -> None:
    loop = "while :; do date +%s%N > tick.$SLURM_PROCID; sleep 0.02; done"
    job = lab.sbatch(f"#!/bin/sh\nsrun bash -c '{loop}'\n", ["-N2", "--ntasks-per-node=2"])
    lab.wait_job(job, "RUNNING")
    paths = [lab.shared / f"tick.{rank}" for rank in range(4)]
    eventually(lambda: all(p.exists() for p in paths))
    lab.hang_rank(job, 2)
    assert list(lab.faults().values()).count("rank-hung") == 1

    def moving() -> list[bool]:
        old = [p.stat().st_mtime_ns for p in paths]
        eventually(
            lambda: sum(p.stat().st_mtime_ns != o for p, o in zip(paths, old, strict=True)) >= 3
        )
        return [p.stat().st_mtime_ns != o for p, o in zip(paths, old, strict=True)]

    assert moving() == [True, True, False, True]
    stopped = next(node for node, state in lab.faults().items() if state == "rank-hung")
    lab.heal(stopped)
    old = paths[2].stat().st_mtime_ns
    eventually(lambda: paths[2].stat().st_mtime_ns != old)
    lab.exec("head", ["scancel", str(job)], check=True)
    with pytest.raises(LabError, match="no process of rank 9"):
        lab.hang_rank(job, 9)


def test_partition_cuts_only_the_link(lab: Cluster) -> None:
    def reach() -> bool:
        probe = "import socket; socket.create_connection(('n2', 6818), timeout=0.3)"
        return lab.exec("n1", ["python", "-c", probe]).returncode == 0

    assert reach()
    lab.partition("n2")
    assert not reach()
    assert lab.exec("n2", ["true"]).returncode == 0
    lab.heal("n2")
    eventually(reach)


def test_node_that_slurm_gave_up_is_usable_after_heal() -> None:
    with Cluster(nodes=2, standby=0, slurm_conf={"SlurmdTimeout": 3}) as lab:
        lab.partition("n1")
        lab.crash("n2")
        eventually(lambda: all("DOWN" in state for state in lab.nodes().values()), 60)
        lab.heal("n1")
        lab.heal("n2")
        assert hostnames(lab, 2) == ["n1", "n2"]


# -- labs come and go -------------------------------------------------------------------------


def test_two_labs_do_not_meet(lab: Cluster) -> None:
    with Cluster(nodes=1, standby=0) as other:
        (other.shared / "here").touch()
        assert not (lab.shared / "here").exists()
        other.crash("n1")
        assert lab.faults()["n1"] == "up"
        assert other.name in host.lab_names()
        with pytest.raises(LabError, match="up already"):
            Cluster(name=other.name).__enter__()
    assert not other.spec.dir.exists()
    assert hostnames(lab, 4) == ["n1", "n2", "n3", "n4"]


def test_bad_configuration_is_told_and_leaves_nothing() -> None:
    lab = Cluster(nodes=1, standby=0, slurm_conf={"SlurmctldPort": "x"})
    with pytest.raises(LabError, match="Invalid SlurmctldPort"):
        lab.__enter__()
    assert not lab.spec.dir.exists()


_OWNER = """
import sys, time
from lab import Cluster
with Cluster(name=sys.argv[1], nodes=2, standby=0) as lab:
    lab.sbatch("#!/bin/sh\\nsrun sleep 1000\\n", ["-N2"])
    lab.popen("n1", ["sleep", "1000"])
    print("up", flush=True)
    time.sleep(1000)
"""


def _family(root: int) -> dict[int, str]:
    """The pids of a process and all below it, with their start times."""
    parents: dict[int, int] = {}
    starts: dict[int, str] = {}
    for pid in _all_pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[pid], starts[pid] = int(fields[1]), fields[19]
    found = {root}
    while more := {p for p, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: starts[pid] for pid in found}


def _namespaces(pids: list[int]) -> set[str]:
    found: set[str] = set()
    for pid in pids:
        try:
            found |= {str(p.readlink()) for p in Path(f"/proc/{pid}/ns").iterdir()}
        except OSError:
            continue
    return found


def _all_pids() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


@pytest.mark.parametrize("victim", ["owner", "reaper", "keeper", "down"])
def test_nothing_stays(victim: str) -> None:
    name = f"gone-{os.getpid()}-{victim}"
    argv = [sys.executable, "-c", _OWNER, name]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "up\n"
            _kill_and_look(name, victim, owner.pid)
        finally:
            owner.kill()
    assert name not in Path("/proc/self/mountinfo").read_text()
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, timeout=10).stdout
    assert not re.search(r"switch|: p\d+b\d+", links)
    assert name not in host.lab_names()
    assert not host.take_down(name)


def _kill_and_look(name: str, victim: str, owner: int) -> None:
    directory = Lab(name).spec.dir
    reaper = host.reaper_pid(directory)
    family = _family(reaper)
    assert len(family) >= 8
    spaces = _namespaces(list(family)) - _namespaces([os.getpid()])
    assert len({s for s in spaces if s.startswith("net:")}) == 4  # switch, head, n1, n2
    keeper = next(p for p in family if p != reaper and _parent(p) == reaper)
    others = _now(dict.fromkeys(_all_pids(), ""))
    if victim == "down":
        assert host.take_down(name)
    else:
        os.kill({"owner": owner, "reaper": reaper, "keeper": keeper}[victim], signal.SIGKILL)
    eventually(lambda: not directory.exists(), 10)
    eventually(lambda: not family.items() & _now(family).items(), 10)
    # The kernel soon gives a namespace's number again, to a lab of another test: so those who were
    # there before are asked.
    eventually(
        lambda: not spaces & _namespaces([pid for pid, _ in others.items() & _now(others).items()]),
        10,
    )


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _now(family: dict[int, str]) -> dict[int, str]:
    """Who of a family is still there (a zombie's parent is ours to wait for: it is not)."""
    found: dict[int, str] = {}
    for pid in family:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found[pid] = fields[19]
    return found


def test_stale_files_are_taken_over(lab: Cluster) -> None:
    stale = Cluster(nodes=1, standby=0)
    stale.spec.dir.mkdir(parents=True)
    (stale.spec.dir / "junk").mkdir()
    (stale.spec.dir / "junk" / "file").touch()
    with stale:
        assert not (stale.spec.dir / "junk").exists()
    stale.spec.dir.mkdir(parents=True)
    assert host.take_down(stale.name)
    assert not stale.spec.dir.exists()


def test_closed_directories_are_opened_for_the_user() -> None:
    top = Path(f"/root/lab-test-{os.getpid()}")
    inner = top / "clone"
    inner.mkdir(parents=True)
    top.chmod(0o700)
    try:
        (inner / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (inner / "run.sh").chmod(0o755)
        with Cluster(nodes=1, standby=0, visible=[inner]) as lab:
            assert lab.exec("n1", [str(inner / "run.sh")], cwd=inner).stdout == "ran\n"
            assert lab.exec("n1", ["ls", "-A", str(top)]).stdout == "clone\n"
    finally:
        (inner / "run.sh").unlink()
        inner.rmdir()
        top.rmdir()


def test_command_line(lab: Cluster) -> None:
    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        argv = [sys.executable, "-m", "lab", *words]
        return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)

    at = ["--name", lab.name]
    assert run("exec", *at, "n1", "--", "hostname").stdout == "n1\n"
    assert run("exec", *at, "n1", "--root", "--", "id", "-u").stdout == "0\n"
    assert run("exec", *at, "n1", "--", "sh", "-c", "exit 9").returncode == 9
    assert f"export LAB_SHARED={lab.shared}" in run("env", *at).stdout
    assert re.search(r"crash n1 at 20.*\(\d+\.\d+\)", run("crash", *at, "n1").stdout)
    assert re.search(r"n1 .*crashed", run("status", *at).stdout)
    assert "usable after" in run("heal", *at, "n1").stdout
    for words in (["crash", *at, "n7"], ["hang", *at], ["status", "--name", "nope"], ["exec", *at]):
        bad = run(*words, *(["n1"] if words[0] == "exec" else []))
        assert bad.returncode == 2
        assert bad.stderr.startswith("lab: ")
