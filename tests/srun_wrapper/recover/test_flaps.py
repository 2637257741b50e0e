"""A node that was unreachable and answers again: its report is withdrawn, a second one stands."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import pytest
from made_job import Job

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.flaps import Flap
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.shared_cause import Kind, Silence
from srun_wrapper.job.model import Node, Role
from srun_wrapper.recover import flaps
from srun_wrapper.recover.reports import Reports

DOWN, UP = "unreachable", "refused"  # answers of a kernel


class Site:
    """A job of two nodes, its reports, and a network that answers as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
        monkeypatch.setattr(flaps, "LOOK", 0.01)
        monkeypatch.setattr(flaps, "NO_REBOOT", 0.5)
        monkeypatch.setattr(flaps, "probe", self.probe)
        self.answers = list(answers)  # the last one is repeated
        self.reported: list[dict[str, Any]] = []
        self.withdrawn: list[tuple[str, str]] = []
        ledger: Any = SimpleNamespace(
            dir=None,
            report_node=lambda _name, _incident, record: self.reported.append(record),
            withdraw=lambda name, _incident, _job, _why, cause: self.withdrawn.append(
                (name, cause)
            ),
        )
        self.job = Job()
        self.reports = Reports(self.job.state.nodes, ledger, "u")
        self.job.state.on_back = self.reports.came_back

    async def probe(self, *_: Any) -> str:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    @property
    def node(self) -> Node:
        return self.job.node(1)

    def lose(self, kind: Kind = "unreachable", *, proven: bool = False) -> None:
        """Give the node up, and judge it as an eviction does."""
        node, now = self.node, time.monotonic()
        node.last_word, node.silence = now - 0.1, Silence(kind, now - 0.1, now)
        self.job.state.lose_silent(node, "no word", shared=False)
        diagnosis = diagnose([Failure("node_lost", now, now - 0.1, node.name)])
        if proven:
            diagnosis = dataclasses.replace(diagnosis, proven=diagnosis.suspects)
        self.reports.judge(node, Incident("0-1", 1, diagnosis, now - 0.1, now))

    async def report(self) -> None:
        """Report it when it has been replaced, and look for as long as is looked."""
        self.reports.report_silent()
        await self.reports.flaps.over()


@pytest.mark.parametrize(
    ("answers", "kind", "proven", "withdrawn"),
    [
        ((UP,), "unreachable", False, True),
        ((DOWN, DOWN, UP), "unreachable", False, True),
        (("accepted",), "unreachable", False, True),
        ((DOWN,), "unreachable", False, False),  # it crashed, or is down for longer
        ((UP,), "unreachable", True, False),  # tests have named it
        ((UP,), "mute", True, False),
    ],
)
def test_a_report_stands_only_where_no_outage_explains_it(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    answers: tuple[str, ...],
    kind: Kind,
    proven: bool,
    withdrawn: bool,
) -> None:
    site = Site(monkeypatch, *answers)

    async def scene() -> None:
        site.lose(kind, proven=proven)
        await site.report()

    asyncio.run(scene())
    assert [record["rule"] for record in site.reported] == ["node-lost"]
    assert site.withdrawn == [("n1", "transient")] * withdrawn
    assert [bad.node for bad in site.reports.evidence()] == ["n1"] * (not withdrawn)
    assert site.reports.barred.bad == ["n1"] * (not withdrawn)
    assert site.reports.reported("n1") is not withdrawn
    assert ("the report against n1 is withdrawn" in capfd.readouterr().err) is withdrawn


def test_one_whose_kernel_answered_all_the_time_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A person, a debugger, a frozen cgroup, a paused machine: its processes were stopped."""
    site = Site(monkeypatch, UP)

    async def scene() -> None:
        site.lose("mute")
        await site.report()

    asyncio.run(scene())
    assert not site.reported and not site.reports.evidence()
    assert site.reports.barred.bad == ["n1"]  # this job does not get it again


@pytest.mark.parametrize(("ago", "stands"), [(299.0, True), (301.0, False)])
def test_a_second_flap_soon_after_stands_with_both_as_evidence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ago: float, stands: bool
) -> None:
    site = Site(monkeypatch, UP)

    async def scene() -> None:
        now = time.monotonic()
        site.reports.flaps.note("n1", Flap(now - ago - 3.0, now - ago))
        site.lose()
        await site.report()

    asyncio.run(scene())
    (record,) = site.reported
    before = [line for line in record["evidence"] if "lost before" in line]
    if stands:
        assert before == ["n1: lost before, 299 s ago, when it answered again after 3.0 s"]
        assert not site.withdrawn and site.reports.reported("n1")
        assert "but its report stands: n1: lost before" in capfd.readouterr().err
    else:
        assert not before and site.withdrawn


def test_a_node_that_came_back_before_it_was_replaced_has_flapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(monkeypatch, UP)

    async def scene() -> None:
        site.lose()
        site.job.join(1)
        assert not site.reported  # as ever
        site.lose()
        await site.report()

    asyncio.run(scene())
    assert len(site.reported) == 1 and not site.withdrawn


def test_a_reboot_is_no_flap(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer after a machine could have booted, or seen only then, is none."""
    site = Site(monkeypatch, UP)

    async def late(*_: Any) -> str:
        await asyncio.sleep(0.6)
        return UP

    async def scene() -> None:
        monkeypatch.setattr(flaps, "probe", late)
        site.lose()
        await site.report()

    asyncio.run(scene())
    assert len(site.reported) == 1 and not site.withdrawn


@pytest.mark.parametrize(
    ("answers", "signalled", "withdrawn"),
    [
        ((DOWN, DOWN, UP), False, True),  # its outage lasts longer than the job
        ((DOWN,), False, False),
        ((DOWN, DOWN, UP), True, False),  # Slurm kills robust-srun soon
    ],
)
def test_robust_srun_waits_at_its_end_for_a_node_that_may_answer_again(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...], signalled: bool, withdrawn: bool
) -> None:
    site, took = Site(monkeypatch, *answers), 0.0

    async def scene() -> None:
        nonlocal took
        site.lose()
        site.reports.report_silent()
        began = time.monotonic()
        await site.reports.flaps.close(lambda: signalled)
        took = time.monotonic() - began

    asyncio.run(scene())
    assert len(site.reported) == 1 and site.withdrawn == [("n1", "transient")] * withdrawn
    assert took < (0.1 if signalled else 2.0)


@pytest.mark.parametrize(
    ("gone", "silent", "kind", "seconds"),
    [
        (True, True, "unreachable", 7.0),
        (True, True, None, 7.0),
        (True, True, "mute", 0.0),  # its kernel answers: it is not cut off
        (True, False, "unreachable", 0.0),  # its robust-task died, or it was told to end
        (False, True, "unreachable", 0.0),
    ],
)
def test_how_long_a_lost_node_may_only_be_cut_off(
    gone: bool, silent: bool, kind: Kind | None, seconds: float
) -> None:
    silence = Silence(kind, 97.0) if kind else None
    was = Role.ACTIVE if silent else None
    node: Any = SimpleNamespace(gone=gone, silent_as=was, silence=silence, last_word=97.0)
    assert flaps.may_return([node], 100.0, 10.0) == seconds
    assert flaps.may_return([node], 108.0, 10.0) == 0.0
    assert flaps.may_return([], 100.0, 10.0) == 0.0
