"""Standby nodes are requested before a node is proven to be lost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from made_job import Job

from srun_wrapper.detect.node_watch import BROKEN, UNANSWERED, NodeWatch
from srun_wrapper.recover.standby import prerequest
from srun_wrapper.recover.standby.prerequest import Prerequest
from srun_wrapper.recover.standby.request import MAX_STANDBY_NODES


class Prerequested:
    """The real Prerequest, and the nodes for which it would request others."""

    def __init__(self, job: Job) -> None:
        self.watch, self.ended = NodeWatch(job.state), False
        requests: Any = SimpleNamespace(prerequest=self._prerequest)
        self._parts = Prerequest(
            job.state.members,
            requests,
            self.watch,
            lambda: job.state.signalled > 0 or self.ended,
        )
        self._suspects: list[str] = []

    def _prerequest(self, _wanted: Any, suspects: list[str]) -> None:
        self._suspects = suspects

    def now(self) -> list[str]:
        self._parts.for_doubtful(time.monotonic())
        return self._suspects


def heard(job: Job) -> None:
    for node in job.state.nodes.values():
        node.last_word = time.monotonic()


def test_nodes_that_lack_are_asked_for_ever_more_rarely() -> None:
    """A request waits in Slurm's queue for days; one that Slurm refuses is told in the output."""
    job = Job(3, 0)
    asked: list[Any] = []
    lacking, clock = [1], [time.monotonic()]
    requests: Any = SimpleNamespace(prerequest=lambda wanted, _suspects: asked.append(wanted))
    parts = Prerequest(
        job.state.members, requests, NodeWatch(job.state), lambda: False, lambda: lacking
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prerequest, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        for _ in range(3600):
            clock[0] += 1.0
            parts.for_vacant()
        assert 10 < len(asked) < 25 and asked[0] == [(1, "")]
        lacking.clear()
        parts.for_vacant()
    assert asked[-1] == []  # at once: the requests are withdrawn


@pytest.mark.parametrize(
    ("trouble", "doubted"),
    [
        ({"last_word": 0.4, "probing": True, "asked_at": 1.0}, False),  # its report may be late
        ({"last_word": 1.0}, False),  # a machine with a lot to do: its host has answered
        ({"last_word": 1.0, "probing": True, "asked_at": UNANSWERED / 2}, False),
        ({"last_word": 1.0, "probing": True, "asked_at": UNANSWERED * 2}, True),
        ({"last_word": 1.0, "unreachable": 1}, True),
        # Asked whether it can be asked, or heard of meanwhile:
        ({"probing": True, "asked_at": 1.0}, False),
        ({"closed_at": BROKEN / 2}, False),
        ({"closed_at": BROKEN * 2}, True),
        ({"last_word": 5.0}, True),
    ],
)
def test_a_node_in_doubt_may_have_to_be_replaced(trouble: dict[str, Any], doubted: bool) -> None:
    """``last_word``, ``asked_at`` and ``closed_at``: so many seconds ago."""
    job = Job(2, 0, standby_partition="standby")
    requested, node = Prerequested(job), job.node(1)
    heard(job)
    assert requested.now() == []
    for name, value in trouble.items():
        ago = name in ("last_word", "asked_at", "closed_at")
        setattr(node, name, time.monotonic() - value if ago else value)
    assert requested.now() == [node.name] * doubted
    node.last_word, node.closed_at = time.monotonic(), None
    assert requested.now() == []


def test_nobody_is_asked_for_when_the_step_is_being_ended() -> None:
    job = Job(2, 0, standby_partition="standby")
    requested = Prerequested(job)
    heard(job)
    job.node(1).last_word -= 5.0
    assert requested.now()
    requested.ended = True
    assert not requested.now()
    requested.ended, job.state.signalled = False, 15
    assert not requested.now()


def test_a_request_stays_while_a_shared_cause_is_only_suspected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Withdrawn and made again, it would preempt two jobs of others for one node."""
    job = Job(2, 0, standby_partition="standby")
    requested, seen = Prerequested(job), {"suspected": False, "shared": False}
    monkeypatch.setattr(requested.watch, "is_shared", lambda: seen["shared"])
    monkeypatch.setattr(requested.watch, "seems_shared", lambda _now: any(seen.values()))
    heard(job)
    job.node(1).last_word -= 5.0
    seen["suspected"] = True
    assert requested.now() == []  # nothing new is asked for
    seen["suspected"] = False
    assert requested.now() == ["n1"]
    seen["suspected"] = True
    assert requested.now() == ["n1"]
    seen["shared"] = True
    assert requested.now() == []


def test_more_silent_nodes_than_can_be_replaced() -> None:
    job = Job(MAX_STANDBY_NODES + 1, 0, standby_partition="standby")
    requested = Prerequested(job)
    heard(job)
    for index in range(MAX_STANDBY_NODES):
        job.node(index).last_word -= 5.0
    assert len(requested.now()) == MAX_STANDBY_NODES
    job.node(MAX_STANDBY_NODES).last_word -= 5.0
    assert requested.now() == []


def test_none_is_asked_for_while_steps_show_that_the_ranks_live() -> None:
    job = Job(2, 0, standby_partition="standby")
    requested, pace = Prerequested(job), job.state.pace
    heard(job)
    job.node(1).last_word = time.monotonic() - 60.0
    assert requested.now() == ["n1"]
    pace.recent, pace.stepped = [0.1], time.monotonic()
    assert requested.now() == []
