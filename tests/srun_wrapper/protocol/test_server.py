"""The supervisor's end of an agent's connection."""

from __future__ import annotations

import logging
import socket
import struct

import agent_node
import pytest
from agent_node import Boss, Shim, wait

from srun_wrapper.protocol.messages import Hello, Inspect

boss, shim = agent_node.boss, agent_node.shim


def test_orders_to_a_connection_that_was_reset_print_nothing(
    boss: Boss, shim: Shim, caplog: pytest.LogCaptureFixture
) -> None:
    """In an outage many orders meet it; asyncio itself prints a line that nobody can place."""
    wait(lambda: bool(boss.of(Hello)))
    connection = boss.connections[0]
    transport = connection._transport
    assert transport is not None
    boss.do(transport.pause_reading)
    agent = shim.agent._uplink._link
    assert agent is not None
    agent._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    shim.call(agent.close)
    wait(lambda: agent._sock.fileno() < 0)
    with caplog.at_level(logging.WARNING):
        boss.do(lambda: [connection.send(Inspect(1, 1.0)) for _ in range(20)])
    wait(lambda: connection.closed)
    assert [r.message for r in caplog.records if r.name.startswith("asyncio")] == []
