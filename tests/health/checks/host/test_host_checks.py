"""Every host and fabric family: a healthy node has no findings, an unknown one is not blamed."""

from __future__ import annotations

import pytest
from fake_host import CHECKS, SPOOL, healthy, ids
from fake_system import FakeSystem, context

from health.check import Check

each = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)


@each
@pytest.mark.parametrize("where", ["prolog", "epilog", "sweep", "deep"])
def test_a_healthy_node_has_no_findings(check: Check, where: str) -> None:
    assert check.run(healthy(context=context(where))) == []


@each
@pytest.mark.parametrize("where", ["prolog", "sweep"])
def test_an_empty_tree_is_no_fault_of_the_node(check: Check, where: str) -> None:
    """A container, another kernel, a recorded tree of GPUs only: what is not there is no FAIL."""
    assert check.run(FakeSystem(context=context(where))) == []


@each
def test_no_command_runs_on_a_healthy_node(check: Check) -> None:
    system = healthy()
    check.run(system)
    assert not [asked for asked in system.asked if asked.startswith("command")]


def test_a_lab_node_is_healthy() -> None:
    """A network namespace of its own, no systemd, an empty cgroup tree, munge in another place."""
    conf = (
        "AuthType=auth/munge\nAuthInfo=socket=/lab/munge.socket,cred_expire=5\n"
        "SlurmdSpoolDir=/lab/spool\nSlurmdParameters=config_overrides\n"
        "NodeName=n1 CPUs=8 RealMemory=16000000\n"
    )
    usual = healthy()
    system = healthy(
        more={"/etc/slurm/slurm.conf": conf, "/proc/1/comm": "python3\n", "/proc/net/route": ""},
        without=(
            "/run/munge/munged.pid",
            "/etc/fstab",
            "/sys/fs/cgroup/system.slice/nvidia-fabricmanager.service/cgroup.events",
            "/sys/bus/pci/drivers/nvidia-nvswitch/0000:05:00.0/class",
        ),
        entries={"/lab/munge.socket": usual.entries["/run/munge/munge.socket.2"]},
        disks={"/lab/spool": usual.disks[SPOOL]},
        probes={"/lab/spool": None},
        dirs=["/lab/spool"],
        context=context("sweep"),
    )
    assert ids([finding for check in CHECKS for finding in check.run(system)]) == []
