"""Reports, exclusions and drains of the nodes that leave a job."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from replacing import Scene

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.exclusions import Strength
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import LadderPlan
from srun_wrapper.job.model import Role
from srun_wrapper.recover import flaps


@pytest.mark.parametrize("proven", [True, False])
def test_a_node_whose_own_mount_is_silent_is_excluded_and_its_mount_reported(
    tmp_path: Any, proven: bool
) -> None:
    """A node that waits alone at this moment is no proof: its server may be away."""
    scene, reports = Scene(tmp_path), []
    scene.ledger.report_node = lambda name, _incident, record: reports.append(
        (name, record["symptom"], *record["evidence"], record["rule"])
    )
    node, cause = scene.node(3, "a"), Failure("hang", 1.0, 0.0, "n4")
    node.stalled, node.own_mount = ("/data",), "/data" if proven else ""
    incident = Incident("0-1", 1, diagnose([cause]), 0.0, 1.0)
    scene.parts.release.evict(("n4",), incident)
    assert node.role is Role.EVICTED  # either way
    assert [bad.node for bad in scene.parts.reports.evidence()] == (["n4"] if proven else [])
    line = "file system /data does not answer on n4 alone"
    assert reports == ([("n4", "mount_silent", line, "own-mount")] if proven else [])


def test_only_nodes_that_were_reported_are_drained(tmp_path: Any) -> None:
    """With drain = "direct": not those that left for another's fault, nor one that came back."""
    scene, drained = Scene(tmp_path), []
    scene.slurm.drain = lambda name, _reason: drained.append(name)
    crashed, silent, back, stalled, ours, shared = (scene.node(i, "a") for i in range(3, 9))
    silent.silent_as = back.silent_as = Role.ACTIVE
    stalled.stalled, ours.ours = ("/data",), True
    names = tuple(n.name for n in (crashed, silent, back, stalled, ours, shared))
    diagnosis = diagnose([Failure("crash", 1.0, 0.0, crashed.name)])
    incident = Incident(
        "0-1", 1, dataclasses.replace(diagnosis, unreported=frozenset({shared.name})), 0.0, 1.0
    )
    incident.plan = LadderPlan("swap_spare", names, "")

    async def leave() -> None:
        scene.parts.release.evict(names, incident)
        scene.state.on_back(back)
        scene.parts.reports.report_silent()
        await scene.parts.reports.flaps.close(lambda: True)
        scene.parts.release._drain(incident)

    asyncio.run(leave())
    assert drained == [crashed.name, silent.name]


def test_a_drain_waits_until_it_is_known_whether_the_report_stands(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, drained = Scene(tmp_path), []
    node = scene.node(3, "a")

    async def answers(*_: Any) -> str:
        await asyncio.sleep(0.05)
        return "refused"

    async def insist(what: str, order: Callable[[], Any]) -> None:
        if "drain" in what:
            order()

    async def leave() -> None:
        scene.state.lose_silent(node, "no word", shared=False)
        incident = Incident("0-1", 1, diagnose(scene.state.failures), 0.0, 1.0)
        incident.plan = LadderPlan("swap_spare", (node.name,), "")
        scene.parts.release.evict((node.name,), incident)
        scene.parts.reports.report_silent()
        assert scene.parts.reports.reported(node.name)
        await scene.parts.release._release([node.name], incident)

    monkeypatch.setattr(flaps, "probe", answers)
    scene.ledger.withdraw = lambda *_: None
    scene.slurm.drain = lambda name, _reason: drained.append(name)
    scene.parts.release._config = dataclasses.replace(scene.state.config, drain="direct")
    scene.parts.release._wait = cast(Any, SimpleNamespace(insist=insist))
    asyncio.run(leave())
    assert not drained and not scene.parts.reports.reported(node.name)


def test_a_suspect_that_stays_is_reported_when_it_is_bad_later(tmp_path: Any) -> None:
    """No node could replace the suspect when it was one of several of a hang."""
    scene, reports = Scene(tmp_path), []
    scene.ledger.report_node = lambda name, *_: reports.append(name)
    node = scene.nodes[0]
    several = diagnose([Failure("hang", 1.0, 0.0, "n1", suspects=("n1", "n2"))], 2)
    scene.parts.release.evict(("n1",), Incident("0-1", 1, several, 0.0, 1.0))
    scene.parts.release.reinstate(("n1",))
    assert node.role is Role.ACTIVE and not reports
    crash = diagnose([Failure("crash", 1.0, 0.0, "n1")])
    scene.parts.release.evict(("n1",), Incident("0-2", 2, crash, 1.0, 2.0))
    assert reports == ["n1"]
    assert [bad.node for bad in scene.parts.reports.evidence()] == ["n1"]


@pytest.mark.parametrize("stalled", [False, True])
def test_what_tests_prove_counts_for_a_node_that_stayed_and_for_one_that_waits_for_a_mount(
    tmp_path: Any, stalled: bool
) -> None:
    """Neither was recorded: the job could get the node back."""
    scene, proofs = Scene(tmp_path), []
    scene.ledger.report_node = lambda _name, _id, record: proofs.append(record["proven"])
    crash = diagnose([Failure("crash", 1.0, 0.0, "n1")])
    if stalled:
        scene.nodes[0].stalled = ("/data",)
    else:
        scene.parts.release.evict(("n1",), Incident("0-1", 1, crash, 0.0, 1.0))
        scene.parts.release.reinstate(("n1",))
    tested = dataclasses.replace(crash, proven=("n1",))
    for number in range(2):
        scene.parts.release.evict(("n1",), Incident(f"0-{number + 2}", 2, tested, 1.0, 2.0))
    assert proofs == ([True] if stalled else [False, True])
    (bad,) = scene.parts.reports.evidence()
    assert (bad.node, bad.strength) == ("n1", Strength.PROVEN)
