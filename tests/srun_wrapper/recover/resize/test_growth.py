"""Growing back: nodes are there, all ranks stand after one step, and not before."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from srun_wrapper.recover.resize import growth
from srun_wrapper.recover.resize.growth import Growth
from srun_wrapper.recover.resize.standing import NOWHERE


class Stands:
    """Standing, as a test says."""

    def __init__(self) -> None:
        self.step, self.world, self.all_saved = NOWHERE, 3, True
        self.since: float | None = None
        self.found = "wait"
        self.ordered = self.released = 0

    def order(self) -> None:
        self.ordered, self.step = self.ordered + 1, 7

    def where(self, now: float) -> str:
        return self.found

    def release(self, now: float) -> None:
        self.released, self.step = self.released + 1, NOWHERE

    def release_stragglers(self, now: float) -> None: ...

    def forget(self) -> None:
        self.step = NOWHERE


class Scene:
    def __init__(self, **config: Any) -> None:
        self.state: Any = SimpleNamespace(
            config=SimpleNamespace(**{"min_nodes": 3} | config),
            pace=SimpleNamespace(step_time=lambda: 0.1),
            changed=SimpleNamespace(set=lambda: None),
            world=SimpleNamespace(is_ending=lambda: False, epoch=2, all_stepped=lambda: True),
            progress=SimpleNamespace(beats=0),
            signalled=0,
            stopped=lambda: False,
        )
        self.resizing: Any = SimpleNamespace(
            prepared=lambda _now: True, unfit=lambda: "", note_steps=lambda: None
        )
        self.standing = Stands()
        self.growth = Growth(self.state, self.resizing, cast(Any, self.standing))

    def look(self, after: float = 0.0) -> None:
        self.growth.look(time.monotonic() + after)


def test_all_stand_before_the_world_grows() -> None:
    scene = Scene()
    scene.look()
    assert scene.standing.step == 7 and not scene.growth.due
    scene.look()
    assert not scene.growth.due
    scene.standing.found = "all"
    scene.look()
    assert scene.growth.due
    scene.look()
    assert scene.standing.ordered == 1
    scene.growth.begin()
    assert not scene.growth.due and scene.standing.step == NOWHERE


def test_ranks_that_went_past_the_step_are_asked_again_later() -> None:
    scene = Scene()
    scene.look()
    scene.standing.found = "over"
    scene.look()
    assert (scene.standing.released, scene.standing.ordered) == (1, 1)
    scene.look()
    assert scene.standing.ordered == 1
    scene.look(growth.AGAIN + 1)
    assert scene.standing.ordered == 2


@pytest.mark.parametrize("change", ["gone", "signalled", "ending"])
def test_ranks_go_on_when_there_is_nothing_to_stand_for(change: str) -> None:
    scene = Scene()
    scene.look()
    if change == "gone":
        scene.resizing.prepared = lambda _now: False
    elif change == "signalled":
        scene.state.signalled = 15
    else:
        scene.state.world.is_ending = lambda: True
    scene.look()
    assert scene.standing.released == 1 and not scene.growth.due


def test_nobody_stands_where_it_was_not_asked_for() -> None:
    scene = Scene(min_nodes=0)
    scene.look()
    assert scene.standing.step == NOWHERE


@pytest.mark.parametrize("saves", [True, False])
def test_says_once_that_a_job_cannot_be_smaller(
    monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """``saves``: it has Checkpointers; without any it is known when all have made a step."""
    said: list[str] = []
    monkeypatch.setattr(growth, "say", said.append)
    scene = Scene()
    scene.resizing = scene.growth._resizing = cast(
        Any,
        SimpleNamespace(
            prepared=lambda _now: False, unfit=lambda: "the mesh", note_steps=lambda: None
        ),
    )
    if not saves:
        scene.standing.world = 0
        scene.look()
        assert not said
        scene.state.progress.beats = 1
    scene.look()
    scene.look()
    assert said == ["min_nodes: this job cannot go on with fewer nodes: the mesh"]
