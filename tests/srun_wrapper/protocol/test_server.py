"""The supervisor's end of an agent's connection."""

from __future__ import annotations

import logging
import socket
import struct

import agent_node
import pytest
from agent_node import FakeSupervisor, Shim, wait

from srun_wrapper.protocol.messages import Hello, Inspect

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
