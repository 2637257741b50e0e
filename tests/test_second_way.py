"""The second way to a node: what a kernel answers to connections that nobody has accepted yet."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from srun_wrapper.server import probe
from srun_wrapper.watch import PROBE_TIMEOUT, PROBED_AGAIN

HOST = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0), backlog=0) as sock:
        yield sock


def second_way(listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return asyncio.run(probe(HOST, port, PROBE_TIMEOUT, PROBED_AGAIN))


@pytest.fixture
def full(listener: socket.socket) -> Iterator[socket.socket]:
    """Its kernel drops who wants to connect, as a host that is gone does."""
    with ExitStack() as stack:
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener


def test_a_process_that_accepts_nobody(listener: socket.socket) -> None:
    assert second_way(listener) == "accepted"


def test_a_process_that_is_gone(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert asyncio.run(probe(HOST, port, PROBE_TIMEOUT, PROBED_AGAIN)) == "refused"


def test_a_host_that_does_not_answer(full: socket.socket) -> None:
    began = time.monotonic()
    assert second_way(full) == "unreachable"
    assert time.monotonic() - began >= PROBE_TIMEOUT


def test_the_first_packet_is_lost(full: socket.socket) -> None:
    """The kernel would try again by itself only after a second."""

    async def answer_late() -> str:
        asyncio.get_running_loop().call_later(0.05, full.accept)  # there is room for one more
        return await probe(HOST, full.getsockname()[1], 0.95, (0.1, 0.2))

    assert asyncio.run(answer_late()) == "accepted"
