"""The gate on a real Slurm: each fault drains its node with the right reason, the job goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from gate_lab import GateLab, gate_lab
from waiting import until

from lab import Cluster

Inject = Callable[[Cluster, str], object]
NO_DRIVER = {"init": "NVML_ERROR_DRIVER_NOT_LOADED"}
READ_ONLY = "EXT4-fs (nvme0n1p1): Remounting filesystem read-only"


class Fault(NamedTuple):
    name: str
    inject: Inject
    reason: str  # "robust:…:" with {dir} for the lab's directory, without the job
    evidence: str  # words of what slurmd logs


# One node each, which two others stand in for.
FAULTS = (
    Fault(
        "xid-79", lambda lab, n: lab.gpu(n, 1, xid=79), "node:xid-79:gpu1:reboot", "fallen off the"
    ),
    Fault("ecc", lambda lab, n: lab.gpu(n, 0, ecc=2), "node:xid-48:gpu0:reset-gpu", "double bit"),
    Fault(
        "xid-95",
        lambda lab, n: lab.gpu(n, 1, xid=95, text="Uncontained: LTC TAG"),
        "node:xid-95:gpu1:reset-gpu",
        "Uncontained: LTC TAG",
    ),
    Fault(
        "gpu-lost",
        lambda lab, n: lab.gpu(n, 1, lost=True),
        "node:gpu-gone:gpu1:reboot",
        "NVML_ERROR_GPU_IS_LOST",
    ),
    Fault(
        "gpu-absent",
        lambda lab, n: lab.gpu(n, 1, lost="absent"),
        "node:gpu-missing:-:reboot",
        "1 GPU on the PCI bus, 2 configured",
    ),
    Fault(
        "remap-failed",
        lambda lab, n: lab.gpu(n, 0, remap_failed=True),
        "node:remap-failed:gpu0:service",
        "remapping failure: yes",
    ),
    Fault(
        "pcie-width",
        lambda lab, n: lab.gpu(n, 1, pcie_width=8),
        "node:pcie-width:gpu1:reboot",
        "width x8, expected x16",
    ),
    Fault(
        "recovery-action",
        lambda lab, n: lab.gpu(n, 0, recovery_action=1),
        "node:recovery-reset:gpu0:reset-gpu",
        "NVML recovery action 1",
    ),
    Fault(
        "no-driver",
        lambda lab, n: lab.gpu(n, set=NO_DRIVER),
        "node:driver-not-loaded:-:none",
        "NVML_ERROR_DRIVER_NOT_LOADED",
    ),
    Fault(
        "nvlink-down",
        lambda lab, n: lab.gpu(n, 1, set={"nvlink4.active": "0"}),
        "node:nvlink-down:gpu1:reboot",
        "17 NVLinks active, expected 18",
    ),
    Fault("hot", lambda lab, n: lab.gpu(n, 0, temp=95), "node:temperature-gpu:gpu0:none", "95 °C"),
    Fault(
        "ib-down",
        lambda lab, n: lab.link(n, up=False, port="mlx5_1"),
        "node:ib-down:mlx5_1:none",
        "state DOWN",
    ),
    Fault("full-tmp", lambda lab, n: lab.fill(n, "/tmp"), "node:disk-full:/tmp:none", "0 B free"),
    Fault(
        "stale-mount",
        lambda lab, n: lab.stale_mount(n),
        "node:mount-hung:{dir}/node/scratch:none",
        "no answer in",
    ),
    Fault(
        "read-only",
        lambda lab, n: lab.kmsg(n, READ_ONLY, level=2),
        "node:fs-readonly:nvme0n1p1:reboot",
        "Remounting filesystem",
    ),
)
HURT = {fault.name: f"n{number}" for number, fault in enumerate(FAULTS, 1)}
WELL = [f"n{len(FAULTS) + number}" for number in (1, 2)]


@pytest.fixture(scope="module")
def gates() -> Iterator[GateLab]:
    with gate_lab(nodes=len(FAULTS) + 2) as site:
        site.put_last(*WELL)
        yield site


@pytest.fixture(scope="module")
def victims(gates: GateLab) -> dict[str, int]:
    """A job for every fault, sent to the node that has it; all at once, as on a bad day."""
    jobs = {}
    for fault in FAULTS:
        fault.inject(gates.lab, HURT[fault.name])
        jobs[fault.name] = gates.submit_on(HURT[fault.name], *WELL, args=("--gres=gpu:1",))
    return jobs


def test_a_healthy_node_admits_and_asks_slurm_nothing(gates: GateLab) -> None:
    """First of all: the later tests break most nodes."""
    calls = gates.count_slurm_calls()
    job = gates.run(WELL[0], "--gres=gpu:2")
    assert gates.output(job) == f"{job} {WELL[0]}\n"
    assert calls() == 0
    assert gates.node(WELL[0]) == (frozenset({"IDLE"}), "")
    assert [event.data["did"] for event in gates.local(WELL[0], "run")] in (
        [],
        ["admitted", "open"],  # with a WARN, as of a clock that nothing sets
    )
    gates.sweep(WELL[0])
    assert calls() == 1  # the wrapper counts: the sweep has to ask


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_fault(gates: GateLab, victims: dict[str, int], fault: Fault) -> None:
    node, job = HURT[fault.name], victims[fault.name]
    reason = f"robust:{fault.reason.format(dir=gates.lab.spec.dir)}:job{job}"
    gates.wait_requeued(job, 40)
    assert gates.reason(node) == reason
    assert fault.evidence in gates.said(node)
    gates.start_now(job)
    record = gates.ended(job)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1")
    assert record["NodeList"] in WELL
    assert gates.output(job) == f"{job} {record['NodeList']}\n"
    assert gates.others(*HURT.values()) == {}
    (drain,) = gates.local(node, "drain")
    assert drain.data["reason"] == reason and fault.evidence in str(gates.local(node))
    until(lambda: gates.shared(node, "drain") == [drain], "the same in the shared ledger")


def test_what_people_see(gates: GateLab, victims: dict[str, int]) -> None:
    node, job = HURT["pcie-width"], victims["pcie-width"]
    gates.wait_reason(node, f"robust:node:pcie-width:gpu1:reboot:job{job}")
    listing = gates.lab.exec("head", ["sinfo", "-Rh", "-n", node, "-o", "%E %n %t"]).stdout
    assert listing.split() == [f"robust:node:pcie-width:gpu1:reboot:job{job}", node, "drain"]
    config = ["--config", str(gates.etc / "robust.toml")]
    done = gates.lab.exec(node, ["robust-health", "check", "--json", *config], user=False)
    assert done.returncode == 1, done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    assert verdict["reason"] == "robust:node:pcie-width:gpu1:reboot:job0"
    shown = gates.lab.exec("head", ["robust-status", "--state-dir", str(gates.state)]).stdout
    row = next(line for line in shown.splitlines() if node in line.split())
    assert "pcie-width" in row, shown
