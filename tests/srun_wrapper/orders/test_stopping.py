"""Nodes whose ranks survive SIGKILL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from made_job import Job, made_stalls

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.shared_cause import Silence
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.protocol.messages import Stopped


@pytest.mark.parametrize(
    ("nodes", "stuck", "reported"),
    [(4, [2], ["n2"]), (4, [1, 2], ["n1", "n2"]), (4, [1, 2, 3], []), (2, [0, 1], [])],
)
def test_processes_that_survive_on_many_nodes_at_once_are_no_nodes_fault(
    nodes: int, stuck: list[int], reported: list[str]
) -> None:
    """A part of a file system that is away holds them all, though its servers answer."""
    job = Job(nodes, 0)
    for index in range(nodes):
        pids = (77,) if index in stuck else ()
        job.say(index, Stopped(1, job.state.world.epoch, 0, pids))
    stopping = Stopping(job.state, made_stalls(job.state))
    asyncio.run(stopping.end_ranks(job.state.world.places, lambda: False))
    assert [failure.node for failure in job.state.failures] == [f"n{i}" for i in stuck]
    diagnosis = diagnose(job.state.failures, nodes)
    assert list(diagnosis.suspects) == reported
    assert diagnosis.unreported == {f"n{i}" for i in stuck} - set(reported)


def test_one_that_is_silent_and_does_not_end_its_ranks_is_not_reported() -> None:
    """A stopped robust-task is no fault of its node."""
    job = Job(4, 0)
    stalls = made_stalls(job.state)

    async def over(_ready: Callable[[], bool], _seconds: float) -> bool:
        return False

    stalls.until = over  # type: ignore[method-assign]
    for index in (0, 3):
        job.say(index, Stopped(1, job.state.world.epoch, 0, ()))
    job.node(1).silence = Silence("mute", 0.0)
    asyncio.run(Stopping(job.state, stalls).end_ranks(job.state.world.places, lambda: False))
    diagnosis = diagnose(job.state.failures, 4)
    assert (diagnosis.suspects, diagnosis.unreported) == (("n2",), {"n1"})
