"""The shim's event loop, and an authenticated connection on it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from robust_slurm.frames.wire import MAX_FRAME, Codec
from srun_wrapper.agent import task_log  # noqa: F401 - it writes the log on stderr
from srun_wrapper.agent.connections import link as link_module
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.messages import Ack, PeerAsk, encode

KEY = b"k" * 32


def turn_until(loop: Loop, ready: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "not in time"
        loop.turn(0.05)


class End:
    """One end of a connection and what came to it."""

    def __init__(self, loop: Loop, sock: socket.socket, *, server: bool, key: bytes = KEY) -> None:
        self.got: list[bytes] = []
        self.closed: list[str] = []
        self.ready = 0
        self.on_payload: Callable[[bytes], None] = self.got.append
        self.link = Link(
            loop,
            sock,
            key,
            server=server,
            on_payload=lambda _link, payload: self.on_payload(payload),
            on_close=lambda _link, reason: self.closed.append(reason),
            on_ready=self._on_ready,
        )

    def _on_ready(self, _link: Link) -> None:
        self.ready += 1


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


Pair = tuple[socket.socket, socket.socket]


# ---------------------------------------------------------------- loop


def test_timers_run_in_order_and_can_be_cancelled(loop: Loop) -> None:
    ran: list[str] = []
    loop.later(0.02, lambda: ran.append("second"))
    loop.later(0.0, lambda: ran.append("first"))
    loop.later(0.01, lambda: ran.append("never")).cancel()
    loop.later(0.02, lambda: ran.append("third"))
    turn_until(loop, lambda: len(ran) == 3)
    assert ran == ["first", "second", "third"]


def test_stop_from_a_timer_and_wake_from_a_thread(loop: Loop) -> None:
    loop.later(0.01, loop.stop)
    loop.run()
    woken = threading.Timer(0.05, loop.wake)
    woken.start()
    began = time.monotonic()
    loop.turn(10.0)
    assert time.monotonic() - began < 5.0
    woken.join()


def test_signals_come_through_the_loop(loop: Loop) -> None:
    got: list[int] = []
    before = {s: signal.getsignal(s) for s in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        loop.on_signals([signal.SIGUSR1, signal.SIGUSR2], got.append)
        for signum in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), signum)
        assert got == []
        turn_until(loop, lambda: len(got) >= 2)
        assert got == [signal.SIGUSR1, signal.SIGUSR2]
    finally:
        signal.set_wakeup_fd(-1)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_a_callback_may_close_what_is_ready_too(loop: Loop) -> None:
    """Two sockets are ready in one turn; the first callback closes the other one."""
    pairs = [socket.socketpair() for _ in range(2)]
    readers = [reader for reader, _ in pairs]
    called: list[int] = []

    def close_the_other(mine: int) -> Callable[[int], None]:
        def call(_mask: int) -> None:
            called.append(mine)
            other = readers[1 - mine]
            loop.forget(other)
            other.close()

        return call

    for mine, (reader, writer) in enumerate(pairs):
        loop.watch(reader, close_the_other(mine), write=False)
        writer.send(b"x")
    loop.turn(1.0)
    assert len(called) == 1
    for sock in (s for p in pairs for s in p):
        sock.close()


def test_a_number_used_anew_is_not_called_for_the_old_event(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    readers = [reader for reader, _ in pairs]
    fresh: list[socket.socket] = []
    wrong: list[int] = []

    def replace_the_other(mine: int) -> Callable[[int], None]:
        def call(_mask: int) -> None:
            if fresh:
                return
            other = readers[1 - mine]
            number = other.fileno()
            loop.forget(other)
            other.close()
            fresh.extend(socket.socketpair())
            same = next((s for s in fresh if s.fileno() == number), None)
            assert same is not None
            loop.watch(same, wrong.append, write=False)

        return call

    for mine, (reader, writer) in enumerate(pairs):
        loop.watch(reader, replace_the_other(mine), write=False)
        writer.send(b"x")
    loop.turn(1.0)
    assert fresh and wrong == []
    for sock in (*fresh, *(s for p in pairs for s in p)):
        sock.close()


# ---------------------------------------------------------------- link


def test_messages_both_ways_also_before_the_handshake(loop: Loop, sockets: Pair) -> None:
    server = End(loop, sockets[0], server=True)
    client = End(loop, sockets[1], server=False)
    client.link.send(PeerAsk(1))
    assert not client.link.ready
    client.link.send(PeerAsk(2))
    server.link.send(Ack(9, 0.25))
    turn_until(loop, lambda: len(server.got) == 2 and len(client.got) == 1)
    assert server.got == [encode(PeerAsk(1)), encode(PeerAsk(2))]
    assert client.got == [encode(Ack(9, 0.25))]
    assert (server.ready, client.ready) == (1, 1)
    assert client.link.ready and client.link.ready_once and client.link.connected


def test_a_message_that_cannot_be_handled_costs_none_of_those_behind_it(
    loop: Loop, sockets: Pair, capfd: pytest.CaptureFixture[str]
) -> None:
    """A Stop behind it in the same packet was lost: the node seemed not to obey."""
    server = End(loop, sockets[0], server=True)
    client = End(loop, sockets[1], server=False)
    turn_until(loop, lambda: server.link.ready and client.link.ready)
    take = server.link._on_payload
    failed: list[bytes] = []

    def fails_once(link: Link, payload: bytes) -> None:
        if payload == b"bad":
            failed.append(payload)
            raise OSError("no thread")
        take(link, payload)

    server.link._on_payload = fails_once
    for payload in (b"first", b"bad", b"second", b"third"):
        client.link.send_payload(payload)
    turn_until(loop, lambda: len(server.got) == 3)
    assert server.got == [b"first", b"second", b"third"] and failed == [b"bad"]
    assert "internal error, continuing: OSError" in capfd.readouterr().err


def test_large_traffic_arrives_whole(loop: Loop, sockets: Pair) -> None:
    server = End(loop, sockets[0], server=True)
    client = End(loop, sockets[1], server=False)
    sent = [bytes([i % 256]) * (i * 997 % 200_000) for i in range(30)]
    client.link.send_payload(b"first")
    turn_until(loop, lambda: server.got == [b"first"])
    for payload in sent:
        client.link.send_payload(payload)
    turn_until(loop, lambda: len(server.got) == 31)
    assert server.got[1:] == sent


def test_another_key_closes_the_connection(loop: Loop, sockets: Pair) -> None:
    server = End(loop, sockets[0], server=True)
    client = End(loop, sockets[1], server=False, key=b"x" * 32)
    client.link.send(PeerAsk(1))
    turn_until(loop, lambda: bool(server.closed and client.closed))
    assert server.got == [] and "not authentic" in server.closed[0]


def test_a_stranger_is_cut_off(loop: Loop, sockets: Pair) -> None:
    server = End(loop, sockets[0], server=True)
    sockets[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    turn_until(loop, lambda: bool(server.closed))
    assert "does not speak" in server.closed[0]


def test_an_oversized_frame_closes_the_connection(loop: Loop, sockets: Pair) -> None:
    server = End(loop, sockets[0], server=True)
    codec = Codec(KEY, server=False)
    sockets[1].sendall(codec.preface() + (MAX_FRAME + 1).to_bytes(4, "big") + bytes(16))
    turn_until(loop, lambda: bool(server.closed))
    assert "over the limit" in server.closed[0]


def test_a_peer_that_takes_nothing_is_given_up(
    loop: Loop, sockets: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_BACKLOG", 1 << 20)
    server = End(loop, sockets[0], server=True)
    codec = Codec(KEY, server=False)
    sockets[1].sendall(codec.preface())
    turn_until(loop, lambda: server.link.ready)
    for _ in range(100):
        server.link.send_payload(bytes(100_000))
    assert server.closed == ["peer does not read its messages"]
    server.link.send_payload(b"nothing happens")
    server.link.close()
    assert len(server.closed) == 1


def test_closing_is_told_once_on_both_sides(loop: Loop, sockets: Pair) -> None:
    server = End(loop, sockets[0], server=True)
    client = End(loop, sockets[1], server=False)
    turn_until(loop, lambda: server.link.ready and client.link.ready)
    server.link.close("enough")
    server.link.close("again")
    turn_until(loop, lambda: bool(client.closed))
    assert server.closed == ["enough"]
    assert len(client.closed) == 1
    assert not client.link.ready and client.link.ready_once


def test_last_words_are_read_although_the_peer_is_gone(loop: Loop, sockets: Pair) -> None:
    """Finish and then close: what we were about to say must not make us deaf."""
    server = End(loop, sockets[0], server=True)
    client = End(loop, sockets[1], server=False)
    turn_until(loop, lambda: server.link.ready and client.link.ready)
    server.link.send(Ack(1, 0.25))
    server.link.send(Ack(2, 0.25))
    server.link.close()
    client.link.send(PeerAsk(1))
    client.link.send(PeerAsk(2))
    assert client.got == []
    turn_until(loop, lambda: bool(client.closed))
    assert client.got == [encode(Ack(1, 0.25)), encode(Ack(2, 0.25))]


def test_a_payload_handler_may_close(loop: Loop, sockets: Pair) -> None:
    server = End(loop, sockets[0], server=True)
    client = End(loop, sockets[1], server=False)

    def close(payload: bytes) -> None:
        server.got.append(payload)
        server.link.close()

    server.on_payload = close
    for n in range(3):
        client.link.send(PeerAsk(n))
    turn_until(loop, lambda: bool(client.closed))
    assert server.got == [encode(PeerAsk(0))]


def test_connecting_to_nobody_says_refused(loop: Loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    sock = socket.socket()
    sock.setblocking(False)
    try:
        sock.connect(address)
    except BlockingIOError:
        client = End(loop, sock, server=False)
        turn_until(loop, lambda: bool(client.closed))
        assert "refused" in client.closed[0] and not client.link.connected
    except ConnectionRefusedError:
        sock.close()  # loopback may answer at once: for the caller of connect to handle


def test_work_aside_that_raises_has_a_result(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    results: list[str] = []
    loop.run_in_thread(lambda: str(1 // 0), results.append, "otherwise")
    turn_until(loop, lambda: bool(results))
    assert results == ["otherwise"]
    assert "internal error, continuing: ZeroDivisionError" in capfd.readouterr().err


def test_work_aside_for_which_there_is_no_thread_has_a_result(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller must not wait for ever: it may be a slot that is to say that its ranks ended."""

    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    results: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", start)
    loop.run_in_thread(lambda: "done", results.append, "otherwise")
    monkeypatch.undo()
    turn_until(loop, lambda: bool(results))
    assert results == ["otherwise"]
