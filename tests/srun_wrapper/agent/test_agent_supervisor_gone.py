"""The agent and a supervisor that is cut off, mute, stopped, dead or out of reach."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import agent_node
import pytest
from agent_node import FakeSupervisor, Shim, crash, start, wait

from srun_wrapper.agent import node_agent
from srun_wrapper.agent.batch_host_failover import ask_peer
from srun_wrapper.agent.connections import silence, uplink
from srun_wrapper.agent.connections.silence import SilenceVerdict
from srun_wrapper.protocol.messages import (
    Finish,
    Hello,
    NumberedMessage,
    Peer,
    Report,
    Started,
)

supervisor, shim = agent_node.supervisor, agent_node.shim


def numbers(events: list[NumberedMessage]) -> list[int]:
    return [event.number for event in events]


def test_events_survive_a_cut_connection_and_count_once(
    supervisor: FakeSupervisor, shim: Shim
) -> None:
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.activate()
    supervisor.order(start(1))
    wait(supervisor.state.world.all_started)
    for _ in range(5):
        before = len(supervisor.of(Hello))
        shim.emit(Started(0, 1, 0, 1))
        supervisor.cut()
        shim.emit(Started(0, 1, 0, 2))
        wait(lambda n=before: len(supervisor.of(Hello)) > n)  # type: ignore[misc]
    shim.emit(crash())
    (node,) = supervisor.state.nodes.values()
    # Stopped, Started, ten more, Exited. A message is in `heard` after the state has taken it.
    wait(lambda: 13 in numbers(supervisor.of(NumberedMessage)))
    assert node.seen == 13
    assert sorted(set(numbers(supervisor.of(NumberedMessage)))) == list(range(1, 14))
    assert len(supervisor.state.failures) == 1
    assert [h.epoch for h in supervisor.of(Hello)] == [0, 1, 1, 1, 1, 1]
    assert shim.verdicts == []


def test_events_while_nobody_acknowledges_are_sent_again(
    supervisor: FakeSupervisor, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor took an event from the socket and lost it with the connection."""
    monkeypatch.setattr(uplink, "QUIET", 0.3)
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.activate()
    supervisor.order(start(1))
    wait(supervisor.state.world.all_started)
    supervisor.mute = True
    shim.emit(crash(code=3))
    wait(lambda: len(supervisor.connections) >= 2)
    supervisor.mute = False
    wait(lambda: len(supervisor.state.failures) == 1)
    assert supervisor.state.failures[0].code == 3


def test_an_order_that_went_under_is_given_again(supervisor: FakeSupervisor, shim: Shim) -> None:
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.activate()
    (node,) = supervisor.state.nodes.values()
    node.order = start(1)  # sent into a connection that was breaking
    supervisor.cut()
    wait(supervisor.state.world.all_started)
    assert shim.orders == [start(1)]


def test_a_mute_supervisor_is_not_stormed(
    supervisor: FakeSupervisor, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor accepts but does not answer: agents connect anew now and then, not always."""
    monkeypatch.setattr(uplink, "QUIET", 0.3)
    wait(lambda: bool(supervisor.of(Hello)))
    began = time.monotonic()
    supervisor.mute = True
    wait(lambda: len(supervisor.connections) >= 4)
    assert time.monotonic() - began >= 2 * 0.3  # the first was quiet for some time before
    supervisor.mute = False
    heard = len(supervisor.heard)
    wait(lambda: len(supervisor.heard) > heard + 3)
    assert shim.verdicts == []


def test_a_supervisor_that_is_stopped_is_waited_for(
    supervisor: FakeSupervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor's kernel alone answers (Ctrl-Z): one waiting connection, no verdict."""
    monkeypatch.setattr(uplink, "CONNECT_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as stopped:
        shim = Shim(supervisor, tmp_path, port=stopped.getsockname()[1])
        shim.agent.lost_host = 0.3
        stopped.settimeout(5.0)
        conn, _ = stopped.accept()
        stopped.settimeout(0.8)
        with pytest.raises(TimeoutError):
            stopped.accept()
        assert shim.verdicts == []
        shim.close()
        conn.close()


def test_a_dead_supervisor(
    supervisor: FakeSupervisor, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "DEAD_SUPERVISOR", 0.5)
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.activate()
    supervisor.order(start(1))
    wait(lambda: len(shim.orders) == 1)
    died = time.monotonic()
    supervisor.die()
    wait(lambda: bool(shim.verdicts))
    assert 0.4 < time.monotonic() - died < 5.0
    assert shim.verdicts == [(SilenceVerdict.SUPERVISOR_DEAD, start(1))]


def test_a_dead_supervisor_when_the_step_is_ended(supervisor: FakeSupervisor, shim: Shim) -> None:
    """Slurm's SIGKILL follows: it would leave what is kept in memory."""
    wait(lambda: bool(supervisor.of(Hello)))
    supervisor.die()
    wait(lambda: shim.agent._uplink.contact.refused_since is not None)
    shim.call(lambda: shim.agent.signalled(signal.SIGUSR1))
    shim.call(lambda: shim.agent.signalled(signal.SIGTERM))
    wait(lambda: bool(shim.verdicts), silence.DEAD_SUPERVISOR - 1.0)
    assert shim.verdicts == [(SilenceVerdict.SUPERVISOR_DEAD, None)]


def test_a_supervisor_that_never_was(supervisor: FakeSupervisor, tmp_path: Path) -> None:
    """Refusals over loopback come at once, out of connect() itself: no reason to fall over."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    shim = Shim(supervisor, tmp_path, port=port)
    shim.agent.first = 0.4
    wait(lambda: bool(shim.verdicts))
    assert shim.verdicts == [(SilenceVerdict.SUPERVISOR_DEAD, None)]
    shim.close()


def test_a_lost_host(supervisor: FakeSupervisor, shim: Shim) -> None:
    shim.agent.lost_host = 0.5
    wait(lambda: bool(supervisor.of(Report)))
    # No route leads there, so connect() fails at once and no packet leaves.
    shim.agent._uplink.server = "255.255.255.255"
    supervisor.cut()
    wait(lambda: bool(shim.verdicts))
    assert shim.verdicts == [(SilenceVerdict.HOST_LOST, None)]


def test_an_agent_that_slept_begins_anew(supervisor: FakeSupervisor, shim: Shim) -> None:
    """The agent's host was paused in an outage, and wakes after it."""
    shim.agent.lost_host = silence.SLEPT
    wait(lambda: bool(supervisor.of(Report)))
    shim.agent._uplink.server = "255.255.255.255"
    supervisor.cut()
    hellos = len(supervisor.of(Hello))
    wait(lambda: shim.agent._uplink.contact.unreachable_since is not None)

    def sleep() -> None:
        shim.agent._uplink.server = shim.place.server
        time.sleep(silence.SLEPT + 1.0)

    shim.call(sleep)
    wait(lambda: len(supervisor.of(Hello)) > hellos)
    assert shim.verdicts == []


def test_a_short_break_is_no_verdict(supervisor: FakeSupervisor, shim: Shim) -> None:
    shim.agent.lost_host = 2.0
    wait(lambda: bool(supervisor.of(Report)))
    shim.agent._uplink.server = "255.255.255.255"
    supervisor.cut()
    hellos = len(supervisor.of(Hello))
    wait(lambda: shim.agent._uplink.contact.unreachable_since is not None)
    shim.agent._uplink.server = shim.place.server
    wait(lambda: len(supervisor.of(Hello)) > hellos)
    wait(lambda: shim.agent._uplink.contact.unreachable_since is None)
    assert shim.verdicts == []


@pytest.mark.parametrize("standby_request", [0, 1])
def test_peers_get_an_answer(
    supervisor: FakeSupervisor,
    tmp_path: Path,
    standby_request: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A standby node answers, too, although its own job has another number."""
    monkeypatch.setattr("srun_wrapper.agent.batch_host_failover.ASK", 2.0)
    shim = Shim(
        supervisor,
        tmp_path,
        standby_request=standby_request,
        job_id=12 if not standby_request else 99,
    )
    wait(lambda: bool(supervisor.of(Hello)))
    peer = Peer(4, "127.0.0.1", supervisor.of(Hello)[0].probe_port)
    supervisor.order(start(1, index=4))
    wait(lambda: len(shim.orders) == 1)
    silent = ask_peer(peer, supervisor.key, 12)
    assert silent is not None and 0 <= silent < 2.0
    assert ask_peer(peer, b"another step's key", 12) is None
    assert ask_peer(peer, supervisor.key, 13) is None
    shim.close()


@pytest.mark.parametrize("ran", [False, True])
def test_a_standby_node_without_ranks_ends_by_itself_when_slurm_takes_it_back(
    supervisor: FakeSupervisor, tmp_path: Path, ran: bool
) -> None:
    """The node does not wait for a word of robust-srun, and gets none here."""
    supervisor.state.awaited.add(3)
    shim = Shim(supervisor, tmp_path, standby_request=3, job_id=99)
    told_to_end = lambda: any(isinstance(order, Finish) for order in shim.orders)  # noqa: E731
    try:
        wait(lambda: bool(supervisor.of(Hello)))
        if ran:
            supervisor.activate()
            supervisor.order(start(1))
            wait(supervisor.state.world.all_started)
        assert not told_to_end()
        supervisor.mute = True
        shim.call(lambda: shim.agent.signalled(int(signal.SIGTERM)))
        if ran:
            time.sleep(2 * node_agent.TOLD)  # after TOLD it would tell them
        else:
            wait(told_to_end)
        assert told_to_end() is not ran
    finally:
        shim.close()
