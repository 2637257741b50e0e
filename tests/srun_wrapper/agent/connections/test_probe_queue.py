"""An agent that is stopped: how often its kernel answers for it."""

from __future__ import annotations

import socket

from srun_wrapper.agent.connections.probe import Probe
from srun_wrapper.agent.loop import Loop
from srun_wrapper.detect.node_watch import ASK_AGAIN, LESS_OFTEN

STALLED = 600.0  # s; see ``stall_limit``
OLD_KERNEL = 128  # connections, whatever is asked for


def test_it_answers_for_as_long_as_is_waited_for_a_node_that_is_silent() -> None:
    asked, silent = 0, 0.0
    while silent < STALLED:
        asked, silent = asked + 1, silent + ASK_AGAIN * max(1.0, silent / LESS_OFTEN)
    assert asked < OLD_KERNEL
    probe = Probe(Loop(), b"key", "127.0.0.1", lambda _ask: None)
    for _ in range(asked):  # and nobody takes them out of the queue
        with socket.create_connection(("127.0.0.1", probe.port), 5.0):
            pass
    probe.close()
