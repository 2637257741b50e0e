"""A lab that ends while NVML and mounts hang in it, however it ends, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from lab import Lab, host

pytest.importorskip("pynvml")

_STUCK = """
import sys, time
from lab import Cluster
with Cluster(name=sys.argv[1], nodes=2, standby=0, gpus=2, scratch=True) as lab:
    lab.gpu("n1", nvml_hang="dstate")
    lab.stale_mount("n2")
    lab.popen("n1", ["python", "-c", "import pynvml; pynvml.nvmlInit()"], user=False)
    lab.popen("n2", ["ls", str(lab.scratch)])
    for node in ("n1", "n2"):
        while "D" not in lab.exec(node, ["ps", "-eo", "state="], user=False).stdout:
            time.sleep(0.02)
    print("stuck", flush=True)
    time.sleep(1000)
"""


def owner(code: str, name: str, **environ: str) -> subprocess.Popen[str]:
    """A process with a lab of its own, named `name`."""
    return subprocess.Popen(
        [sys.executable, "-c", code, name],
        cwd=host.REPOSITORY,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("victim", ["owner", "reaper", "keeper", "down"])
def test_nothing_stays_of_what_hangs(victim: str) -> None:
    name = f"stuck-{os.getpid()}-{victim}"
    with owner(_STUCK, name) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "stuck\n"
            reaper = host.reaper_pid(Lab(name).spec.dir)
            family = below(reaper)
            keeper = next(pid for pid, (parent, _) in family.items() if parent == reaper)
            assert len(mounted(name)) > 5  # in the namespaces of the lab's processes
            if victim == "down":
                down = [sys.executable, "-m", "lab", "down", "--name", name]
                subprocess.run(down, cwd=host.REPOSITORY, check=True, timeout=30)
            else:
                pids = {"owner": process.pid, "reaper": reaper, "keeper": keeper}
                os.kill(pids[victim], signal.SIGKILL)
            until(lambda: not family.items() & processes().items(), "end of its processes", 10)
            until(lambda: not (host.ROOT / name).exists(), "end of its directory", 10)
        finally:
            process.kill()
    until(lambda: not mounted(name), "end of its mounts", 10)
    assert name not in host.lab_names()


@pytest.mark.parametrize("end", ['exec /usr/bin/cc "$@"', "exit 1"])
def test_nothing_stays_when_the_owner_is_killed_while_nvml_is_built(
    tmp_path: Path, end: str
) -> None:
    name = f"built-{os.getpid()}"
    begun, go_on, slow = tmp_path / "begun", tmp_path / "go-on", tmp_path / "cc"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    slow.write_text(f"#!/bin/sh\ncat {begun} {go_on} >&2\n{end}\n")
    slow.chmod(0o755)
    code = "import sys; from lab import Cluster; Cluster(sys.argv[1], 1, 0, 1).__enter__()"
    with owner(code, name, PATH=f"{tmp_path}:{os.environ['PATH']}") as process:
        begun.write_text("")  # opened when the compiler reads it
        assert (host.ROOT / name).exists()
        process.kill()
        process.wait(10)
        go_on.write_text("")
    until(lambda: not (host.ROOT / name).exists(), "end of its directory", 60)
    assert not mounted(name)


def processes() -> dict[int, tuple[int, str]]:
    """Parent and start time of all processes but zombies, by pid."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        if fields[0] != "Z":
            found[int(entry.name)] = (int(fields[1]), fields[19])
    return found


def below(root: int) -> dict[int, tuple[int, str]]:
    """The same of a process and all below it."""
    found, family = processes(), {root}
    while more := {p for p, (parent, _) in found.items() if parent in family} - family:
        family |= more
    return {pid: found[pid] for pid in family if pid in found}


def mounted(name: str) -> list[str]:
    """The processes in whose mount namespace something of the lab is mounted."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"/{name}/" in (entry / "mountinfo").read_text():
                found.append(entry.name)
        except OSError:  # it ended
            continue
    return found
