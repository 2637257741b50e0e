"""The supervisor's end of an agent's connection."""

from __future__ import annotations

import logging
import socket
import struct

import agent_node
import pytest
from agent_node import FakeSupervisor, Shim, wait

from srun_wrapper.protocol.base import Message, NumberedMessage
from srun_wrapper.protocol.messages import Hello, Inspect, Signalled

supervisor, shim = agent_node.supervisor, agent_node.shim


def test_orders_to_a_connection_that_was_reset_print_nothing(
    supervisor: FakeSupervisor, shim: Shim, caplog: pytest.LogCaptureFixture
) -> None:
    """In an outage many orders meet it; asyncio itself prints a line that nobody can place."""
    wait(lambda: bool(supervisor.of(Hello)))
    connection = supervisor.connections[0]
    transport = connection._transport
    assert transport is not None
    supervisor.do(transport.pause_reading)
    agent = shim.agent._uplink._link
    assert agent is not None
    agent._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    shim.call(agent.close)
    wait(lambda: agent._sock.fileno() < 0)
    with caplog.at_level(logging.WARNING):
        supervisor.do(lambda: [connection.send(Inspect(1, 1.0)) for _ in range(20)])
    wait(lambda: connection.closed)
    assert [r.message for r in caplog.records if r.name.startswith("asyncio")] == []


class Remembered(NumberedMessage):
    """A message of a later version."""

    text: str


class Hinted(Message):
    """Another one, which is not numbered."""


def test_messages_of_a_newer_robust_task_are_left_out(
    supervisor: FakeSupervisor, shim: Shim, caplog: pytest.LogCaptureFixture
) -> None:
    wait(lambda: bool(supervisor.of(Hello)))
    caplog.set_level(logging.WARNING, "robust-srun")
    for _ in range(2):
        shim.call(lambda: shim.agent._numbered(Remembered(0, "text")))
        shim.call(lambda: shim.agent._uplink.send(Hinted()))
    shim.call(lambda: shim.agent._numbered(Signalled(0, 12)))
    wait(lambda: bool(supervisor.of(Signalled)))
    assert len(supervisor.connections) == 1 and not supervisor.connections[0].closed
    said = [r.getMessage() for r in caplog.records if "newer than this robust-srun" in r.message]
    assert [text.split("messages ")[1].split()[0] for text in said] == ["Remembered", "Hinted"]
    wait(lambda: not shim.agent._unacked)  # what came later is acknowledged, so they are as well


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"\xc1",
        b"\x91\x01",
        b"\x92\xa5Hello\x01",
        b"\x91\xa3a b",
        b"\x91\xa2\xff\xff",  # no text
        b"\x91" * 100_000,  # nested too deep
    ],
)
def test_what_is_no_message_still_ends_the_connection(
    supervisor: FakeSupervisor, shim: Shim, broken: bytes
) -> None:
    wait(lambda: bool(supervisor.of(Hello)))
    first = supervisor.connections[0]
    link = shim.agent._uplink._link
    assert link is not None
    shim.call(lambda: link.send_payload(broken))
    wait(lambda: first.closed)
