"""The agent and the node's other shims, over their socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import agent_node
import pytest
from agent_node import FakeSupervisor, Shim, wait

from robust_slurm.memory_dir import MemoryDir, existing
from srun_wrapper.agent import filesystems
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.place import shims_socket
from srun_wrapper.protocol.messages import (
    Exited,
    Hello,
    Inspect,
    Inspected,
    Message,
    RankStart,
    Report,
    SlotActivity,
    SlotHello,
    SlotLost,
    SlotWelcome,
    Start,
    Started,
    StdinRead,
    Stop,
    Stopped,
    decode_to_shim,
)

supervisor, shim = agent_node.supervisor, agent_node.shim


class Second:
    """Another shim of the node, in the agent's loop."""

    def __init__(self, shim: Shim, key: bytes, local: int = 1) -> None:
        self.got: list[Message] = []
        self.link: Link | None = None

        def connect() -> None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(shims_socket(shim.run_dir, shim.place))
            self.link = Link(
                shim.loop,
                sock,
                key,
                server=False,
                on_payload=lambda _link, payload: self.got.append(decode_to_shim(payload)),
                on_close=lambda _link, _reason: None,
            )
            self.link.send(SlotHello(local, local, 4242))

        shim.call(connect)

    def say(self, shim: Shim, message: Message) -> None:
        link = self.link
        assert link is not None
        shim.call(lambda: link.send(message))

    def die(self, shim: Shim) -> None:
        assert self.link is not None
        shim.call(self.link.close)


@pytest.fixture
def two(supervisor: FakeSupervisor, tmp_path: Path) -> Iterator[tuple[Shim, Second]]:
    shim = Shim(supervisor, tmp_path, local_tasks=2, step_tasks=2)
    second = Second(shim, supervisor.key)
    wait(lambda: bool(supervisor.of(Hello)))
    yield shim, second
    shim.close()


Two = tuple[Shim, Second]


def test_a_node_speaks_when_all_its_shims_are_there(
    supervisor: FakeSupervisor, two: Two, tmp_path: Path
) -> None:
    _shim, second = two
    assert supervisor.of(Hello)[0].tasks == (0, 1)
    wait(lambda: second.got == [SlotWelcome(str(tmp_path))])


def test_a_node_has_stopped_when_all_its_slots_have(supervisor: FakeSupervisor, two: Two) -> None:
    shim, second = two
    supervisor.activate()
    supervisor.order(Stop(1, 0.1))
    wait(lambda: Stop(1, 0.1) in second.got and Stop(1, 0.1) in shim.orders)
    reports = len(supervisor.of(Report))
    wait(lambda: len(supervisor.of(Report)) > reports + 1)
    assert supervisor.of(Stopped) == []
    second.say(shim, Stopped(0, 1, 0, (77,)))
    wait(lambda: bool(supervisor.of(Stopped)))
    stopped = supervisor.of(Stopped)[0]
    assert (stopped.epoch, stopped.stuck) == (1, (77,))
    assert stopped.free_port


def test_an_inspection_answers_for_the_whole_node(
    supervisor: FakeSupervisor, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim, second = two
    began = time.monotonic()
    monkeypatch.setattr(
        filesystems, "answering", lambda since: ("/data",) if since > began else ("/earlier",)
    )
    supervisor.order(Inspect(5, 0.1))
    wait(lambda: Inspect(5, 0.1) in second.got)
    second.say(shim, Inspected(5, 0.1, (SlotActivity(1, "S", 0.0, 0),)))
    shim.emit(Inspected(5, 0.1, (SlotActivity(0, "R", 1.0, 0),)))
    wait(lambda: bool(supervisor.of(Inspected)))
    (answer,) = supervisor.of(Inspected)
    assert [s.local for s in answer.samples] == [0, 1]
    assert answer.answering == ("/data",)


def test_a_quick_look_waits_for_no_file_system(supervisor: FakeSupervisor, two: Two) -> None:
    shim, second = two
    order = Inspect(6, 0.0, False, quick=True, machine=True)
    supervisor.order(order)
    wait(lambda: order in second.got)
    wait(lambda: shim.agent._counters.machine is not None)
    second.say(shim, Inspected(6, 0.0, (SlotActivity(1, "S", 0.0, 0),)))
    shim.emit(Inspected(6, 0.0, (SlotActivity(0, "R", 1.0, 0),)))
    wait(lambda: bool(supervisor.of(Inspected)))
    (answer,) = supervisor.of(Inspected)
    assert answer.machine is not None and answer.answering == ()


def test_a_lost_shim_is_news(supervisor: FakeSupervisor, two: Two) -> None:
    shim, second = two
    supervisor.activate()
    link = second.link
    assert link is not None
    shim.call(link.close)
    wait(lambda: bool(supervisor.of(SlotLost)))
    assert supervisor.of(SlotLost)[0].local == 1
    assert [f.symptom for f in supervisor.state.failures] == ["node_lost"]


def test_a_shim_that_comes_back_in_a_stop_has_no_rank_to_stop(
    supervisor: FakeSupervisor, tmp_path: Path
) -> None:
    """The node waited for its answer for ever, and was evicted as stuck."""
    shim = Shim(supervisor, tmp_path, local_tasks=3, step_tasks=3)
    slow, dies = Second(shim, supervisor.key, 1), Second(shim, supervisor.key, 2)
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.activate()
    supervisor.order(Stop(1, 0.1))
    wait(lambda: Stop(1, 0.1) in slow.got and Stop(1, 0.1) in dies.got)
    dies.die(shim)
    wait(lambda: bool(supervisor.of(StdinRead)))
    back = Second(shim, supervisor.key, 2)
    wait(lambda: bool(back.got))
    assert supervisor.of(Stopped) == []
    slow.say(shim, Stopped(0, 1, 0))
    wait(lambda: bool(supervisor.of(Stopped)))
    shim.close()


def test_a_shim_that_dies_before_its_rank_runs_gets_the_order_again(
    supervisor: FakeSupervisor, two: Two
) -> None:
    """The shim's rank was never started, and the node was replaced."""
    shim, second = two
    supervisor.activate()
    ranks = (RankStart(0, 0, {}), RankStart(1, 1, {}))
    order = Start(1, {"SLURM_JOB_ID": "12"}, ranks, 0.5, 0, True, 1, "n0", 29500)
    supervisor.order(order)
    wait(lambda: order in second.got)
    second.die(shim)
    wait(lambda: bool(supervisor.of(StdinRead)))
    back = Second(shim, supervisor.key)
    wait(lambda: order in back.got)
    back.say(shim, Started(0, 1, 1, 4243))
    wait(lambda: len(supervisor.of(Started)) == 2)
    back.die(shim)
    wait(lambda: bool(supervisor.of(Exited)))
    last = Second(shim, supervisor.key)
    wait(lambda: bool(last.got))
    assert order not in last.got, "its rank ended with it: the supervisor decides"


def test_a_shim_without_the_key_is_nobody(supervisor: FakeSupervisor, two: Two) -> None:
    shim, _second = two
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(shims_socket(shim.run_dir, shim.place))
        stranger.sendall(b"hello, I am local id 1\n")
        stranger.settimeout(5.0)
        while stranger.recv(4096):
            pass
    assert supervisor.of(SlotLost) == []


def test_the_shims_meet_in_a_directory_that_nobody_else_can_take(
    supervisor: FakeSupervisor, shim: Shim
) -> None:
    """An abstract name was anybody's once the agent had died, and the next agent had no other."""
    assert Path(shims_socket(shim.run_dir, shim.place)).is_socket()
    assert not Path("/proc/net/unix").read_text().count("@robust-")


def test_directories_of_others_and_of_other_steps_are_not_looked_into(tmp_path: Path) -> None:
    name = f"{os.getpid()}.7"
    first, second, other = MemoryDir(name), MemoryDir(name), MemoryDir(f"{name}1")
    try:
        assert sorted(existing(name)) == sorted([first.path, second.path])
        if os.getuid() == 0:
            os.chown(first.path, 20001, 20001)
            assert existing(name) == [second.path]
        link = second.path.with_name(f"robust-{name}-abcdefgh")
        link.symlink_to(tmp_path)
        assert link not in existing(name)
        link.unlink()
    finally:
        for each in (first, second, other):
            each.close()
    assert existing(name) == []
