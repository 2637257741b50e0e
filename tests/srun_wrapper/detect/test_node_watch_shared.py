"""Many silent nodes at once: a shared cause is waited out, and blames none of them."""

from __future__ import annotations

import asyncio
import time

import pytest
from made_job import Job, silent_nodes

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.detect import node_watch
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.protocol.messages import Report


def watch_for(job: Job, seconds: float, nodes: NodeWatch) -> None:
    async def look() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            job.node(0).second_way, job.node(0).last_word = True, time.monotonic()
            nodes.look(time.monotonic())
            await asyncio.sleep(0.02)

    asyncio.run(look())


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe(*_where: object) -> str:
        await asyncio.sleep(0.01)
        return "unreachable"

    monkeypatch.setattr(node_watch, "probe", probe)
    monkeypatch.setattr(node_watch, "UNANSWERED", 0.0)


def test_many_unreachable_nodes_are_waited_for_and_replaced_without_a_report(
    unreachable: None,
) -> None:
    job, told = Job(6, 0, outage_wait=0.8), list[tuple[str, bool]]()
    nodes = NodeWatch(job.state, on_shared=lambda text, begins: told.append((text, begins)))
    silent_nodes(job, 2, 3, 4, 5)
    silent_nodes(job, 1, since=0.0)
    job.node(1).last_word += 60.0
    watch_for(job, 0.3, nodes)
    assert nodes.waiting() and not job.state.failures
    ((text, begins),) = told
    assert begins and text.startswith("n[2-5] cannot be reached (4 of 6 nodes): a shared cause")
    watch_for(job, 1.0, nodes)
    assert not nodes.waiting()
    found = job.state.failures
    assert [f.node for f in found] == ["n2", "n3", "n4", "n5"] and all(f.shared for f in found)
    assert len(told) == 2 and "not reported as bad" in told[1][0]
    diagnosis = diagnose(found)
    assert (diagnosis.cause, diagnosis.suspects) == ("shared", ())
    assert diagnosis.unreported == {"n2", "n3", "n4", "n5"}


def test_nodes_that_answer_again_in_time_are_kept(unreachable: None) -> None:
    job, told = Job(4, 0), list[tuple[str, bool]]()
    nodes = NodeWatch(job.state, on_shared=lambda text, begins: told.append((text, begins)))
    silent_nodes(job, 1, 2, 3)
    watch_for(job, 0.3, nodes)
    assert nodes.waiting()
    job.state.pace.last, began = 0.0, time.monotonic()
    watch_for(job, 0.05, nodes)
    assert job.state.pace.last >= began  # no step could be made: that is no hang
    for index in range(4):
        job.say(index, Report(1, ()))
    watch_for(job, 0.05, nodes)
    assert not nodes.waiting() and not job.state.failures
    assert len(told) == 2 and "is over after" in told[1][0]
