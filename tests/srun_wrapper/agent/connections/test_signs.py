"""An agent gives signs of life, and tries for robust-srun whether it reaches another node."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from srun_wrapper.agent.connections.signs import EVERY, OPEN, Signs
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.base import Message
from srun_wrapper.protocol.messages import Ack
from srun_wrapper.protocol.peer_messages import Pulse, Reach, Reached

HOST = "127.0.0.1"
FDS = Path("/proc/self/fd")


def answer(port: int, seconds: float, host: str = HOST) -> tuple[Reached, float]:
    """Return what the agent says, and after how long."""
    loop, said = Loop(), list[Message]()
    signs = Signs(loop, said.append)
    fds = len(list(FDS.iterdir()))
    began = time.monotonic()
    assert signs.takes(Reach(7, host, port, seconds))
    while not said and time.monotonic() < began + 10:
        loop.turn(1.0)
    took = time.monotonic() - began
    loop.turn(2 * EVERY)  # an attempt that was still to come
    assert len(list(FDS.iterdir())) <= fds and len(said) == 1  # older loops may end meanwhile
    assert isinstance(said[0], Reached)
    return said[0], took


def test_a_node_that_answers() -> None:
    with socket.create_server((HOST, 0)) as sock:
        said, took = answer(sock.getsockname()[1], 5.0)
    assert (said.token, said.answer) == (7, "accepted") and said.tried and took < 4.0


def test_a_node_whose_robust_task_is_gone() -> None:
    with socket.create_server((HOST, 0)) as sock:
        port = sock.getsockname()[1]
    assert answer(port, 5.0)[0].answer == "refused"


@pytest.mark.parametrize("seconds", [0.2, EVERY * OPEN * 1.5])
def test_a_node_that_nobody_reaches(seconds: float) -> None:
    """A full queue: its kernel drops who wants to connect, as a host that is gone does."""
    with ExitStack() as stack:
        sock = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(sock.getsockname())
        said, took = answer(sock.getsockname()[1], seconds)
    assert said.answer == "unreachable" and said.tried and took >= seconds


def test_no_way_there() -> None:
    """The kernel's own word: it is no answer of the node."""
    said, _ = answer(1, 0.1, host="255.255.255.255")
    assert said.answer == "unreachable" and said.tried == 0, "nothing has left this host"


def test_signs_of_life_as_often_as_asked() -> None:
    loop, said = Loop(), list[Message]()
    signs = Signs(loop, said.append)
    for pulse, more in ((0.01, True), (0.01, True), (0.0, False)):
        assert not signs.takes(Ack(1, 0.25, pulse))  # others read it as well
        said.clear()
        end = time.monotonic() + (5.0 if more else 0.05)
        while len(said) < 3 and time.monotonic() < end:
            loop.turn(0.05)
        assert said == [Pulse()] * 3 * more
