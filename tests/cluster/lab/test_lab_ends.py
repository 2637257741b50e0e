"""Labs come and go: two do not meet, and however one ends, nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab_nodes import hostnames
from waiting import until

from lab import Cluster, Lab, LabError, host


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


@pytest.mark.parametrize("victim", ["owner", "reaper", "keeper", "down"])
def test_nothing_stays(victim: str) -> None:
    name = f"gone-{os.getpid()}-{victim}"
    argv = [sys.executable, "-c", _OWNER, name]
    with subprocess.Popen(argv, cwd=host.REPOSITORY, stdout=subprocess.PIPE, text=True) as owner:
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
    until(lambda: not directory.exists(), "end of its directory", 10)
    until(lambda: not family.items() & _now(family).items(), "end of its processes", 10)
    # The kernel soon gives a namespace's number again, to a lab of another test: so those who were
    # there before are asked.
    until(
        lambda: not spaces & _namespaces([pid for pid, _ in others.items() & _now(others).items()]),
        "end of its namespaces",
        10,
    )


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


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _now(family: dict[int, str]) -> dict[int, str]:
    """Return those of a family still there (not zombies: their parent is ours to wait for)."""
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
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "lab", *words]
        return subprocess.run(argv, cwd=host.REPOSITORY, capture_output=True, text=True, timeout=60)

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
