"""The agent and its supervisor: orders, events, the ranks' steps."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import agent_node
import pytest
from agent_node import FakeSupervisor, Shim, crash, start, wait

from robust_slurm.record import RecordWriter, create, record_path
from srun_wrapper.agent import node_agent
from srun_wrapper.agent.node_agent import TOLD
from srun_wrapper.protocol.messages import Finish, Hello, Report, Started, Stop
from srun_wrapper.protocol.task_options import TaskOptions

supervisor, shim = agent_node.supervisor, agent_node.shim


def test_it_introduces_itself_and_reports(supervisor: FakeSupervisor, shim: Shim) -> None:
    wait(lambda: len(supervisor.of(Report)) >= 3)
    hello = supervisor.of(Hello)[0]
    assert (hello.job_id, hello.node, hello.tasks, hello.epoch) == (12, "n0", (0,), 0)
    assert hello.probe_port and hello.free_port
    assert supervisor.of(Report)[0] == Report(0, ())
    (node,) = supervisor.state.nodes.values()
    assert node.address == "127.0.0.1"


def test_an_epoch(supervisor: FakeSupervisor, shim: Shim) -> None:
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.activate()
    supervisor.order(start(1))
    wait(lambda: bool(supervisor.of(Started)))
    wait(supervisor.state.world.all_started)
    assert shim.orders == [start(1)]
    shim.emit(crash())
    wait(lambda: len(supervisor.state.failures) == 1)
    supervisor.order(Stop(1, 0.2))
    (node,) = supervisor.state.nodes.values()
    wait(lambda: node.stopped == 1)
    supervisor.order(Finish(((1, 0),)))
    wait(lambda: Finish(((1, 0),)) in shim.orders)


@pytest.mark.parametrize(
    ("tasks", "bad", "ends"),
    [(1, False, ((3, 0),)), (2, False, None), (2, True, ((3, 0), (0, 15)))],
)
def test_alone_the_nodes_shims_end_as_its_ranks(
    supervisor: FakeSupervisor,
    tmp_path: Path,
    tasks: int,
    bad: bool,
    ends: tuple[tuple[int, int], ...] | None,
) -> None:
    """Observe mode: all ranks of the node have ended, or one badly where srun ends the step."""
    shim = Shim(supervisor, tmp_path, local_tasks=tasks)
    shim.agent._options = TaskOptions(alone=True, kill_on_bad=bad)
    shim.emit(crash(code=3))
    if ends is None:
        shim.emit(Report(1, ()))
        time.sleep(2 * TOLD)  # nothing comes: an end is told after TOLD
        assert not shim.orders
    else:
        wait(lambda: shim.orders == [Finish(ends)])
    shim.close()


def test_ranks_that_make_no_step_for_long_are_looked_at_less_often(
    supervisor: FakeSupervisor, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait(lambda: bool(supervisor.of(Hello)))
    looks: list[float] = []
    read = shim.agent._beats.read
    monkeypatch.setattr(
        shim.agent._beats, "read", lambda: (looks.append(time.monotonic()), read())[1]
    )
    monkeypatch.setattr(node_agent, "FAST", 0.005)
    monkeypatch.setattr(node_agent, "FAST_FOR", 0.2)
    supervisor.activate()
    supervisor.order(start(1))
    often = supervisor.state.config.interval - 0.02

    def less_often() -> bool:
        last = looks[-5:]
        return len(last) == 5 and all(b - a > often for a, b in itertools.pairwise(last))

    wait(less_often)


def test_beats_are_read_and_old_records_forgotten(
    supervisor: FakeSupervisor, shim: Shim, tmp_path: Path
) -> None:
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.activate()
    for epoch in (1, 2, 3):
        path = record_path(str(tmp_path), epoch, 0)
        create(path, epoch=epoch, local_rank=0, rank=0)
        if epoch > 1:
            supervisor.do(supervisor.state.new_epoch)
        supervisor.order(start(epoch))
        writer = RecordWriter(path)
        writer.beat(10 * epoch)
        writer.close()
        wait(lambda e=epoch: supervisor.state.progress.best == 10 * e)  # type: ignore[misc]
    assert sorted(p.name for p in tmp_path.glob("*.beat")) == ["2-0.beat", "3-0.beat"]
    wait(lambda: any(r.epoch == 3 and r.beats for r in supervisor.of(Report)))
    reports = [r for r in supervisor.of(Report) if r.epoch == 3 and r.beats]
    beat = reports[-1].beats[0]
    assert (beat.local, beat.step, beat.beats, beat.source) == (0, 30, 1, "regex")
    assert 0.0 <= beat.age < 10.0


def test_the_last_step_comes_before_the_end(
    supervisor: FakeSupervisor, shim: Shim, tmp_path: Path
) -> None:
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.activate()
    path = record_path(str(tmp_path), 1, 0)
    create(path, epoch=1, local_rank=0, rank=0)
    supervisor.order(start(1))
    wait(lambda: bool(supervisor.of(Started)))
    writer = RecordWriter(path)
    for step in range(1, 50):
        writer.beat(step)
    shim.emit(crash())
    wait(lambda: len(supervisor.state.failures) == 1)
    assert supervisor.state.progress.best == 49
    writer.close()
