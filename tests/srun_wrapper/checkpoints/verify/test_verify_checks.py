"""Whole checks, with the real Verify and Restoring, by what the results are and what comes amid."""

from __future__ import annotations

import asyncio
import signal

import pytest
from verified_job import Site

from srun_wrapper.checkpoints.verify import check as check_module
from srun_wrapper.checkpoints.verify import rules, verifying
from srun_wrapper.job.model import Role
from srun_wrapper.orders.machine_tests import MachineResults


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for module in (check_module, verifying):
        monkeypatch.setattr(module, "say", lines.append)
    return lines


def check(site: Site) -> str:
    return asyncio.run(asyncio.wait_for(site.check(), 10))


FIRST, RING = ["n0", "n1", "n2", "n3"], ["n1", "n2", "n3", "n0"]


@pytest.mark.parametrize(
    ("sums", "outcome", "places"),
    [
        ((1, 1), "agree", [FIRST, RING]),
        ((1, 2, 1), "machine", [FIRST, RING, FIRST, FIRST]),  # tests, and a start after them
        ((1, 2, 2), "once", [FIRST, RING, FIRST, FIRST]),
        ((1, 2, 3), "program", [FIRST, RING, FIRST]),
    ],
)
def test_what_is_computed_where(
    said: list[str], sums: tuple[int, ...], outcome: str, places: list[list[str]]
) -> None:
    site = Site(*sums)
    assert check(site) == outcome
    assert site.places == places and not site.state.failures
    assert site.tests == ([tuple(FIRST)] if outcome in ("machine", "once") else [])
    assert site.verify.text.startswith("off: ") == (outcome == "program")


def test_a_device_that_is_wrong_now_and_then(said: list[str]) -> None:
    """Checks go on however often it comes; a node leaves only with a proof."""
    site = Site(1, 2, 2)
    for _ in range(3):
        site.sums = (*([1] * site.state.world.epoch), 2)
        assert check(site) == "once"
    assert len(site.tests) == 3 and not site.verify.text.startswith("off: ")
    assert not site.state.failures
    site.sums = (*([1] * site.state.world.epoch), 2)
    site.found = MachineResults({"n2": ("wrong",)}, ("n2: wrong",))
    assert check(site) == "proven"
    (failure,) = site.state.failures
    assert (failure.symptom, failure.suspects) == ("differs", ("n2",))


def test_a_spare_that_is_lost_before_it_has_ranks(said: list[str]) -> None:
    """The check is given up; the nodes of before go on."""
    site = Site(1, 1, spares=3)

    def lost() -> None:
        for node in site.nodes[1:]:
            if node.role is Role.SPARE:
                site.state.lose(node, "no word")

    site.on_stop = lost
    assert check(site) == "unknown"
    assert site.places == [["n0"], ["n0"]] and not site.state.failures


def test_a_spare_that_is_proven_bad_takes_no_place(said: list[str]) -> None:
    """The second result was its work, and the job goes on where it was."""
    site = Site(1, 2, 1, spares=3)
    (spare,) = {node.name for node in site.state.spares()[:1]}
    site.found = MachineResults({}, (f"{spare} is bad",), idle=(spare,))
    assert check(site) == "proven" and site.left == [spare]
    assert site.places == [["n0"], [spare], ["n0"], ["n0"]] and not site.state.failures


@pytest.mark.parametrize("what", ["signal", "input", "ended"])
@pytest.mark.parametrize("sums", [(1, 1), (1, 2, 2)])
def test_ranks_that_would_lose_something_are_not_stopped(
    said: list[str], sums: tuple[int, ...], what: str
) -> None:
    """A signal that a rank has noted, input that cannot be given again, an end already made."""
    site = Site(*sums)
    once = len(sums) - 1  # epochs until then

    def comes() -> None:
        if site.state.world.epoch < once:
            return
        if what == "signal":
            site.state.pass_on(signal.SIGUSR1)
        elif what == "input":
            site.nodes[1].stdin[0] = False
        else:
            site.state.world.note_exit(site.state.world.by_rank[1], 0, 0)

    site.on_sums = comes
    assert check(site) == "unknown"
    assert site.places == [FIRST, RING][:once] and not site.state.stopped()
    assert once == 1 or site.told[-1].endswith("could not be compared: no third result")


def test_a_signal_before_the_ranks_stood_does_not_matter(said: list[str]) -> None:
    site = Site(1, 1)
    site.state.pass_on(signal.SIGUSR1)
    site.state.passed_at -= 60.0
    assert check(site) == "agree"


def test_nothing_is_asked_of_a_job_that_ends() -> None:
    site = Site(1, 1)
    site.state.world.note_exit(site.state.world.by_rank[1], 0, 0)
    site.stand()
    assert site.asked() == []


@pytest.mark.parametrize("lacking", ["a step before it", "a partner", "any node"])
def test_what_cannot_be_computed_again_is_left_out_once(said: list[str], lacking: str) -> None:
    """A slow store may be the reason, and a spare may come; at the second time in a row it ends."""
    site = Site(1, 1, spares={"a step before it": 0, "a partner": 2, "any node": 3}[lacking])
    if lacking == "a step before it":
        site._held.clear()
    elif lacking == "a partner":
        site.state.world.ranks[:] = [(0, 1), (2,)]  # spares have one slot
    else:
        for node in site.state.spares():
            site.state.lose(node, "no word")
    texts = {"a partner": rules.UNEVEN, "any node": rules.ONE_NODE}
    why = texts.get(lacking, "no earlier step is in memory")
    assert check(site) == "unknown" and site.told[-1].endswith(why) and said == []
    assert check(site) == "unknown" and why in said[-1] and site.verify.text.startswith("off: ")
    assert len(site.places) == 1
