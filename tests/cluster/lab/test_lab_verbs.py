"""The command line that breaks a node's hardware: `python -m lab VERB …`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from gpu_nodes import ASK, Running, all_well, cat, differs, free, log, look, python

from lab import Cluster, host

pytest.importorskip("pynvml")
PORT = "/sys/class/infiniband/mlx5_0/ports/1/state"


@pytest.fixture
def lab(gpu_lab: Cluster) -> Cluster:
    return gpu_lab


def run(lab: Cluster, words: str) -> subprocess.CompletedProcess[str]:
    verb, *more = words.split()
    argv = [sys.executable, "-m", "lab", verb, "--name", lab.name, *more]
    return subprocess.run(argv, cwd=host.REPOSITORY, capture_output=True, text=True, timeout=60)


def third(lab: Cluster) -> dict[str, object]:
    return differs(look(lab)[3])


def hangs(lab: Cluster) -> bool:
    with Running(lab, "n1", ["python", "-c", ASK]) as command:
        command.wait_blocked(signal.SIGTERM)
        command.kill("-KILL")
    return True


def stuck(lab: Cluster) -> bool:
    with Running(lab, "n1", ["ls", str(lab.scratch)], stderr=subprocess.PIPE) as command:
        command.wait_state("D")
    return True


@pytest.mark.parametrize(
    ("words", "fault", "shows"),
    [
        ("gpu n1 3 --xid 79", "up", lambda lab: "(PCI:0000:61:00): 79, GPU has" in log(lab)[-1]),
        ("gpu n1 3 --ecc", "gpu3", lambda lab: third(lab) == {"ecc": [1, 1]}),
        ("gpu n1 3 --lost", "gpu3", lambda lab: look(lab)[3] == "GPU is lost"),
        ("gpu n1 3 --lost absent", "gpu3", lambda lab: len(look(lab)) == 7),
        ("gpu n1 3 --remap-failed", "gpu3", lambda lab: third(lab) == {"remap": [0, 0, 0, 1]}),
        ("gpu n1 3 --pcie-width 8", "gpu3", lambda lab: third(lab) == {"width": 8}),
        ("gpu n1 3 --set nvlink4.active=0", "gpu3", lambda lab: third(lab) == {"links": 17}),
        ("gpu n1 3 --nvml-hang", "gpu3", lambda lab: python(lab, "n1", ASK) == "8\n"),
        ("gpu n1 --nvml-hang", "nvml", hangs),
        ("link n1 --down", "mlx5_0", lambda lab: cat(lab, PORT) == "1: DOWN"),
        ("fill n1 /tmp", "full:/tmp", lambda lab: free(lab, "/tmp")[1] == 0),
        ("stale-mount n1", "stale:SCRATCH", stuck),
        ("kmsg n1 panic --level 0", "up", lambda lab: re.match("0,.*;panic$", log(lab)[-1])),
    ],
)
def test_verbs(lab: Cluster, words: str, fault: str, shows: Callable[[Cluster], object]) -> None:
    done = run(lab, words)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r" at 20\d\d-.* \(\d+\.\d+\)\n$", done.stdout)
    assert lab.faults() == {
        "head": "up", "n1": fault.replace("SCRATCH", str(lab.scratch)), "n2": "up",
    }  # fmt: skip
    assert shows(lab)
    assert all_well(lab, "n2")


def test_verbs_that_mend(lab: Cluster) -> None:
    for words in (
        "gpu n1 3 --ecc 4 --temp 95 --driver-is-no-flag",
        "gpu n1 --driver 1.2.3 --nvml-hang dstate",
        "gpu n1 3 --recovery-action 1 --throttle hw-slowdown",
    ):
        assert run(lab, words).returncode == (2 if "no-flag" in words else 0)
    assert lab.faults()["n1"] == "gpu3+nvml"
    for breaks, mends in (
        ("gpu n1 3 --ecc 4 --temp 95", "gpu n1 --heal"),
        ("gpu n1 3 --recovery-action 1", "gpu n1 3 --reset"),
        ("link n1 --down --port mlx5_2", "link n1 --up --port mlx5_2"),
        ("stale-mount n1", "stale-mount n1 --heal"),
        ("fill n1 /tmp --leave 5%", "heal n1"),
    ):
        assert run(lab, breaks).returncode == 0
        assert lab.faults()["n1"] != "up"
        assert run(lab, mends).returncode == 0
        assert lab.faults()["n1"] == "up"
    assert all_well(lab)


def test_status_and_env_tell(lab: Cluster) -> None:
    lab.link("n1", up=False, port="mlx5_2")
    lab.fill("n1", "/tmp")
    assert re.search(r"\nn1 .* mlx5_2\+full:/tmp ", run(lab, "status").stdout)
    assert f"LAB_SCRATCH={lab.scratch}\n" in run(lab, "env").stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("gpu n1", "say what to do"),
        ("gpu n1 9 --xid 79", "n1 has no GPU 9; there are: 0..7"),
        ("gpu n7 1 --xid 79", "no node 'n7'"),
        ("gpu n1 --xid 79", "say which GPU"),
        ("gpu n1 1 --driver 1.2", "about the node"),
        ("gpu n1 1 --xid x", "invalid int value: 'x'"),
        ("gpu n1 1 --xid 10000", "--xid wants 0..9999"),
        ("gpu n1 1 --ecc -1", "--ecc wants 0.."),
        ("gpu n1 1 --lost found", "invalid choice: 'found'"),
        ("gpu n1 1 --nvml-hang x", "invalid choice: 'x'"),
        ("gpu n1 1 --pcie-width 7", "one of 1, 2, 4, 8, 16"),
        ("gpu n1 1 --throttle x", "want some of idle"),
        ("gpu n1 1 --set x", "KEY=VALUE"),
        ("gpu n1 1 --lost -- x", "only exec takes a command"),
        ("link n1", "--down --up is required"),
        ("link n1 --down --port eth0", "invalid choice: 'eth0'"),
        ("fill n1 /", "not on a file system of the node's own"),
        ("fill n1 /tmp --leave x", "--leave wants bytes or a percentage"),
        ("fill n1 tmp", "want a path from the root"),
        ("stale-mount n1 /no/such/place", "not a directory in the node"),
        ("stale-mount n1 /tmp --heal", "no mount of the lab's"),
        ("stale-mount head", "no faults there"),
        ("kmsg n1 x --level 8", "from 0 to 7"),
    ],
)
def test_bad_values_are_refused_and_change_nothing(lab: Cluster, words: str, why: str) -> None:
    done = run(lab, words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert set(lab.faults().values()) == {"up"}
