"""NVML and mounts of a lab's nodes that hang: for callers, for SIGKILL, for the lab itself."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from gpu_nodes import ASK, Running, all_well, cat, log

from lab import Cluster, LabError

pytest.importorskip("pynvml")


@pytest.fixture
def lab(gpu_lab: Cluster) -> Cluster:
    return gpu_lab


def test_nvml_that_sleeps_ends_by_sigkill_only(lab: Cluster) -> None:
    lab.gpu("n1", nvml_hang="sleep")
    with Running(lab, "n1", ["python", "-c", ASK, "sleeper"]) as command:
        command.wait_blocked(signal.SIGTERM)
        command.kill("-TERM")
        assert command.state == "S"
        command.kill("-KILL")
        assert command.process.wait(10) == -signal.SIGKILL


def test_nvml_in_d_state_outlives_sigkill_until_it_is_healed(lab: Cluster) -> None:
    lab.gpu("n1", 5, nvml_hang="dstate")
    assert lab.faults()["n1"] == "gpu5"
    code = "import pynvml as N; N.nvmlInit(); N.nvmlDeviceGetName(N.nvmlDeviceGetHandleByIndex(5))"
    with Running(lab, "n1", ["python", "-c", code]) as command:
        command.wait_state("D")
        command.kill("-KILL")
        assert command.process.poll() is None
        assert command.state == "D"
        lab.gpu("n1", 5, heal=True)
        assert command.process.wait(10) == -signal.SIGKILL
    assert "stuck" not in cat(lab, "/proc/self/mountinfo")
    assert all_well(lab)


def test_nvml_in_d_state_goes_on_when_it_is_healed(lab: Cluster) -> None:
    lab.gpu("n1", nvml_hang="dstate")
    with Running(lab, "n1", ["python", "-c", ASK], stdout=subprocess.PIPE) as command:
        command.wait_state("D")
        lab.heal("n1")
        assert command.process.communicate(timeout=10)[0] == "8\n"


def test_scratch_works_until_it_is_stale(lab: Cluster) -> None:
    scratch = str(lab.scratch)
    use = (
        "cd $0 && mkdir d && echo text > a && mv a d/b && cat d/b && rm d/b && rmdir d && ls -A && "
        "head -c 300000 /dev/zero > big && wc -c < big && rm big"
    )
    for _ in range(2):
        done = lab.exec("n1", ["sh", "-ec", use, scratch], check=True)
        assert done.stdout.split() == ["text", "300000"]
    assert lab.exec("n1", ["stat", f"{scratch}/none"]).returncode == 1
    if Path("/etc/fstab").exists():
        assert f"lab {scratch} fuse.labfs rw,_netdev 0 0" in cat(lab, "/etc/fstab")
    lab.stale_mount("n1")
    assert lab.faults()["n1"] == f"stale:{scratch}"
    with Running(lab, "n1", ["stat", f"{scratch}/x"], stderr=subprocess.PIPE) as command:
        command.wait_state("D")
        command.kill("-KILL")
        assert command.state == "D"
        lab.stale_mount("n1", heal=True)
        assert command.process.wait(10) == -signal.SIGKILL
    for node in ("n1", "n2"):
        done = lab.exec(node, ["sh", "-ec", use, scratch], check=True)
        assert done.stdout.split() == ["text", "300000"]


def test_stale_mount_of_its_own(lab: Cluster) -> None:
    place = lab.spec.node_dir / "projects"
    lab.stale_mount("n2", place)
    assert f"{place} " in cat(lab, "/proc/self/mountinfo", "n2")
    with Running(lab, "n2", ["ls", str(place)], stderr=subprocess.PIPE) as command:
        command.wait_state("D")
        lab.heal("n2")
        assert "connection abort" in command.process.communicate(timeout=10)[1]
    assert str(place) not in cat(lab, "/proc/self/mountinfo", "n2")
    with pytest.raises(LabError, match="not a directory in the node"):
        lab.stale_mount("n2", "/no/such/place")
    with pytest.raises(LabError, match="no mount of the lab's"):
        lab.stale_mount("n2", "/tmp", heal=True)
    assert lab.faults()["n2"] == "up"


def test_the_lab_itself_does_not_hang_on_a_stale_mount(lab: Cluster) -> None:
    lab.stale_mount("n1")
    with pytest.raises(LabError, match="no answer from inside"):
        lab.fill("n1", f"{lab.scratch}/below")
    assert lab.faults()["n1"] == f"stale:{lab.scratch}"
    lab.heal("n1")
    assert lab.faults()["n1"] == "up"


def test_crash_with_processes_in_d_state(lab: Cluster) -> None:
    lab.gpu("n1", nvml_hang="dstate")
    lab.gpu("n1", 3, lost=True)
    lab.link("n1", up=False)
    lab.stale_mount("n1")
    boot = cat(lab, "/proc/sys/kernel/random/boot_id")
    lab.exec("n1", ["touch", f"{lab.disk}/kept"], user=False, check=True)
    one = Running(lab, "n1", ["python", "-c", ASK])
    two = Running(lab, "n1", ["ls", str(lab.scratch)], stderr=subprocess.PIPE)
    with one, two:
        one.wait_state("D")
        two.wait_state("D")
        began = time.monotonic()
        lab.crash("n1")
        assert time.monotonic() - began < 5
        assert one.process.wait(5) == two.process.wait(5) == -signal.SIGKILL
    lab.heal("n1")
    # a boot: healthy hardware, a new log, a new id; the disk is as it was
    assert all_well(lab)
    assert cat(lab, "/sys/class/infiniband/mlx5_0/ports/1/state") == "4: ACTIVE"
    assert not any("Xid" in line for line in log(lab))
    assert cat(lab, "/proc/sys/kernel/random/boot_id") != boot
    uptime = float(cat(lab, "/proc/uptime").split()[0])
    booted = next(row for row in cat(lab, "/proc/stat").splitlines() if row.startswith("btime"))
    assert uptime < 300
    assert abs(time.time() - uptime - int(booted.split()[1])) < 5
    assert lab.exec("n1", ["ls", f"{lab.disk}/kept", str(lab.scratch)]).returncode == 0
    assert lab.faults()["n1"] == "up"
