"""The second way to a node: what a kernel answers to connections that nobody has accepted yet."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from srun_wrapper.detect.node_watch import PROBE_TIMEOUT, PROBED_AGAIN
from srun_wrapper.protocol.server import probe

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
    """Fill a listener, so that its kernel drops new connections, as a host that is gone does."""
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


def test_the_first_attempt_fails_at_once(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is down for a moment; nothing is left over in the end."""
    connect = asyncio.open_connection
    failing = [OSError(errno.ENETUNREACH, "Network is unreachable")]

    async def open_connection(host: str, port: int) -> Any:
        if failing:
            raise failing.pop()
        return await connect(host, port)

    async def ask() -> tuple[str, int]:
        answer = await probe(HOST, listener.getsockname()[1], 30.0, (0.05, 20.0))
        for _ in range(3):
            await asyncio.sleep(0)
        return answer, len(asyncio.all_tasks())

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    assert asyncio.run(ask()) == ("accepted", 1)


def test_an_answer_that_came_while_the_supervisor_was_busy(listener: socket.socket) -> None:
    async def ask() -> str:
        asyncio.get_running_loop().call_soon(time.sleep, PROBE_TIMEOUT + 0.1)
        return await probe(HOST, listener.getsockname()[1], PROBE_TIMEOUT, PROBED_AGAIN)

    assert asyncio.run(ask()) == "accepted"


def test_the_first_packet_is_lost(full: socket.socket) -> None:
    """The kernel would try again by itself only after a second."""

    async def answer_late() -> str:
        asyncio.get_running_loop().call_later(0.05, full.accept)  # there is room for one more
        return await probe(HOST, full.getsockname()[1], 0.95, (0.1, 0.2))

    assert asyncio.run(answer_late()) == "accepted"
