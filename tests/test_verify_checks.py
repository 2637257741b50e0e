"""Whole checks, with the real Verify and Restoring, by what the results are and what comes amid."""

from __future__ import annotations

import asyncio

import pytest
from verify_boss import Site

from srun_wrapper import verifying as module
from srun_wrapper.roster import Role
from srun_wrapper.stop_tests import Found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
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
    site.found = Found({"n2": ("wrong",)}, ("n2: wrong",))
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
    site.found = Found({}, (f"{spare} is bad",), idle=(spare,))
    assert check(site) == "proven" and site.left == [spare]
    assert site.places == [["n0"], [spare], ["n0"], ["n0"]] and not site.state.failures
