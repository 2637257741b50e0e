"""The sweep on a real Slurm: it gives back what is proven, and only what the gate took."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from gate_lab import FREE, GateLab, gate_lab
from waiting import until


@pytest.fixture(scope="module")
def site() -> Iterator[GateLab]:
    with gate_lab(nodes=9, slurm_conf={"RebootProgram": "/bin/true"}) as made:
        yield made


def hurt(site: GateLab, node: str) -> str:
    """The reason for which the sweep has drained an idle node."""
    site.sweep(node)
    reason = site.reason(node)
    assert re.fullmatch(r"robust:\S+:job0", reason), reason
    return reason


def test_a_fault_that_is_gone(site: GateLab) -> None:
    site.lab.fill("n1", "/tmp")
    job = site.submit("-wn1")
    site.wait_requeued(job)
    assert site.reason("n1") == f"robust:node:disk-full:/tmp:none:job{job}"
    said = site.sweep("n1")  # not before
    assert "disk-full" in said and "is drained already" in said
    site.lab.heal("n1")
    assert "undrained" in site.sweep("n1")
    site.wait_node("n1", *FREE)
    site.start_now(job)
    assert site.ended(job)["NodeList"] == "n1"
    (undrain,) = site.shared("n1", "undrain")
    assert undrain.data["reason"] == f"robust:node:disk-full:/tmp:none:job{job}"


def test_a_reset_is_wanted(site: GateLab) -> None:
    site.lab.gpu("n2", 0, ecc=1)
    reason = hurt(site, "n2")
    assert reason == "robust:node:xid-48:gpu0:reset-gpu:job0"
    site.lab.gpu("n2", 0, heal=True)  # the counters are back, but nobody reset the GPU
    site.sweep("n2")
    assert site.reason("n2") == reason
    site.lab.gpu("n2", 0, reset=True)
    site.repaired("n2", "--reset", "gpu0")
    site.sweep("n2")
    site.wait_node("n2", *FREE)


def test_what_needs_a_reboot_and_what_needs_a_person(site: GateLab) -> None:
    site.lab.gpu("n3", 1, lost=True)
    site.lab.gpu("n4", 0, remap_failed=True)
    lost, worn = hurt(site, "n3"), hurt(site, "n4")
    assert lost == "robust:node:gpu-gone:gpu1:reboot:job0"
    assert worn == "robust:node:remap-failed:gpu0:service:job0"
    for node, reason in (("n3", lost), ("n4", worn)):
        site.lab.heal(node)  # it answers again, by itself
        site.sweep(node)
        assert site.reason(node) == reason
    reboot(site, "n3", "n4")
    site.sweep("n3")
    site.sweep("n4")
    site.wait_node("n3", *FREE)
    assert site.reason("n4") == f"{worn} : reboot issued"  # Slurm's words at the end
    site.repaired("n4")
    site.sweep("n4")
    site.wait_node("n4", *FREE)


def reboot(site: GateLab, *nodes: str) -> None:
    """Reboot nodes through Slurm, whose RebootProgram does nothing in this lab."""
    site.admin("reboot", ",".join(nodes))
    for node in nodes:
        site.wait_flag(node, "REBOOT_ISSUED")
        site.lab.crash(node)
    for node in nodes:
        site.lab.heal(node)


@pytest.mark.parametrize("reason", ["maintenance", "NHC: check_fs_mount", "Prolog error"])
def test_the_drain_of_another(site: GateLab, reason: str) -> None:
    site.drain("n5", reason)
    site.sweep("n5")
    assert site.reason("n5") == reason
    site.lab.gpu("n5", 1, pcie_width=8)  # bad as well: the reason stays theirs
    site.sweep("n5")
    assert site.reason("n5") == reason
    site.lab.heal("n5")
    site.sweep("n5")
    assert site.reason("n5") == reason
    site.resume("n5")


def test_a_drain_that_an_administrator_took_over(site: GateLab) -> None:
    site.lab.gpu("n6", 1, pcie_width=8)
    ours = hurt(site, "n6")
    for theirs in ("mine: do not touch", f"{ours} (bob looks at it)"):
        site.drain("n6", theirs)
        site.lab.heal("n6")
        site.sweep("n6")
        assert site.reason("n6") == theirs
        site.lab.gpu("n6", 1, pcie_width=8)
        site.sweep("n6")
        assert site.reason("n6") == theirs
    site.lab.heal("n6")
    site.resume("n6")


def test_a_reboot_behind_slurms_back(site: GateLab) -> None:
    """22.05 takes the node down for it, as ReturnToService=1 wants: that is not ours to undo.

    From 24.11 a node that is drained and idle is not taken down.
    """
    site.lab.gpu("n7", 0, remap_failed=True)
    ours = hurt(site, "n7")
    site.lab.crash("n7")
    site.lab.heal("n7")
    if site.lab.spec.slurm != "22.05":
        assert site.node("n7") == (frozenset({"IDLE", "DRAIN"}), ours)
        site.repaired("n7")
        site.sweep("n7")
        site.wait_node("n7", *FREE)
        return
    site.wait_flag("n7", "DOWN")
    site.repaired("n7")
    said = site.sweep("n7")
    assert "stays drained: the node is also DOWN" in said
    assert site.node("n7") == (frozenset({"DOWN", "DRAIN"}), ours)
    site.resume("n7")


def test_dry_run(site: GateLab) -> None:
    site.lab.link("n8", up=False)
    assert "would drain n8: robust:node:ib-down:mlx5_0:none:job0" in site.sweep(
        "n8", ROBUST_DRY_RUN="1"
    )
    assert site.node("n8") == FREE
    reason = hurt(site, "n8")
    site.lab.heal("n8")
    assert "would be undrained" in site.sweep("n8", "--dry-run")
    assert site.reason("n8") == reason
    site.sweep("n8")
    site.wait_node("n8", *FREE)


def test_slurmd_runs_it(site: GateLab) -> None:
    """The last one: from here on all nodes sweep themselves."""
    conf = site.lab.spec.dir / "etc" / "slurm.conf"
    conf.write_text(re.sub("(?m)^(HealthCheckInterval)=.*$", r"\1=2", conf.read_text()))
    site.admin("reconfigure")
    site.lab.link("n9", up=False)
    site.wait_reason("n9", "robust:node:ib-down:mlx5_0:none:job0", 30)
    site.lab.heal("n9")
    site.wait_reason("n9", "", 30)
    drain, undrain = site.local("n9", "drain", "undrain")
    assert (drain.kind, undrain.data["reason"]) == ("drain", drain.data["reason"])
    until(lambda: site.others() == {}, "all nodes without flags")
