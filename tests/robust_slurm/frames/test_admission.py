"""Listeners and strangers: few unproven connections, the oldest gives way, a thread only later."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from waiting import until

from robust_slurm.frames import framed
from robust_slurm.frames.admission import CROWDED, LATE, Strangers
from robust_slurm.frames.lobby import Lobby
from robust_slurm.frames.wire import MAGIC, MAX_FIRST_FRAME, VERSION, Codec
from srun_wrapper.protocol.messages import Hello, encode
from srun_wrapper.protocol.server import Connection, listen

KEY = bytes(range(32))


def test_the_oldest_gives_way_and_the_late_ones_go() -> None:
    ended: list[tuple[str, str]] = []
    calls: list[tuple[float, Callable[[], None]]] = []
    one: Strangers[str] = Strangers(
        lambda peer, why: ended.append((peer, why)),
        2,
        0.05,
        lambda seconds, call: calls.append((seconds, call)),
    )
    for name in "abc":
        one.enter(name)
    assert ended == [("a", CROWDED)] and len(one) == 2 and len(calls) == 1
    one.leave("b")
    one.leave("b")
    time.sleep(0.06)
    calls.pop()[1]()
    assert ended[1:] == [("c", LATE)] and not calls and not one.evict()


class Server:
    """A lobby that keeps what it admits."""

    def __init__(self, most: int = 8, seconds: float = 30.0, fails: int = 0) -> None:
        self.admitted: list[tuple[socket.socket, Codec, bytes]] = []
        self.fails = fails
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = listener.getsockname()
        self.lobby = Lobby(
            listener, lambda: Codec(KEY, server=True), self._admit, "test", most, seconds
        )

    def _admit(self, *given: socket.socket | Codec | bytes) -> None:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("can't start new thread")
        self.admitted.append(given)  # type: ignore[arg-type]

    def close(self) -> None:
        thread = self.lobby.close()
        thread.join(5)
        assert not thread.is_alive()
        for sock, _, _ in self.admitted:
            sock.close()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = Server(**getattr(request, "param", {}))
    yield made
    made.close()


def prove(address: tuple[str, int], payload: bytes = b"hello") -> tuple[socket.socket, Codec]:
    """Connect as a holder of the key, and send a first payload, a byte at a time."""
    sock = socket.create_connection(address, 10)
    codec = Codec(KEY, server=False)
    sock.sendall(codec.preface())
    while not codec.ready:
        codec.feed(sock.recv(100))
    for byte in codec.seal(payload):
        sock.sendall(bytes([byte]))
    return sock, codec


def closed(sock: socket.socket) -> bool:
    sock.settimeout(10)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass
    return True


@pytest.mark.parametrize("payload", [b"hello", b"", b"x" * MAX_FIRST_FRAME])
def test_what_follows_the_proof_stays_in_the_socket(server: Server, payload: bytes) -> None:
    sock, codec = prove(server.address, payload)
    sock.sendall(codec.seal(b"second"))
    until(lambda: server.admitted, "the peer with the key")
    taken, theirs, first = server.admitted[0]
    taken.settimeout(10)
    assert first == payload
    assert theirs.feed(taken.recv(theirs.wanted) + taken.recv(100)) == [b"second"]
    sock.close()


def _recorded() -> bytes:
    """Return what a holder of the key said in an earlier connection."""
    server, client = Codec(KEY, server=True), Codec(KEY, server=False)
    client.feed(server.preface())
    return client.preface() + client.seal(b"hello")


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        MAGIC + bytes([VERSION - 1]) + bytes(16) + bytes(60),
        MAGIC + bytes([VERSION]) + bytes(16) + b"\xff" * 60,
        MAGIC + bytes([VERSION]) + bytes(16) + (MAX_FIRST_FRAME + 1).to_bytes(4, "big") + bytes(16),
        _recorded(),
    ],
    ids=["another protocol", "an older version", "a false proof", "too long", "a replay"],
)
def test_strangers_are_closed_at_once(server: Server, said: bytes) -> None:
    with socket.create_connection(server.address, 10) as sock:
        sock.sendall(said)
        assert closed(sock)
    assert not server.admitted


def test_reflection_is_no_proof(server: Server) -> None:
    """Send back what the listener sent here, and what it sent to another connection."""
    with (
        socket.create_connection(server.address, 10) as one,
        socket.create_connection(server.address, 10) as other,
    ):
        first, second = one.recv(100), other.recv(100)
        one.sendall(second + bytes(20))
        other.sendall(first + bytes(20))
        assert closed(one) and closed(other)
    assert not server.admitted


@pytest.mark.parametrize("server", [{"fails": 1}], indirect=True)
def test_a_thread_too_few_ends_that_connection_alone(server: Server) -> None:
    sock, _ = prove(server.address)
    assert closed(sock)
    again, _ = prove(server.address)
    until(lambda: server.admitted, "the next one")
    again.close()


@pytest.mark.parametrize("server", [{"seconds": 0.2}], indirect=True)
def test_a_slow_proof_is_none(server: Server) -> None:
    with socket.create_connection(server.address, 10) as sock:
        assert closed(sock)


def test_strangers_cost_no_thread_and_keep_nobody_out(server: Server) -> None:
    before = threading.active_count()
    crowd = [socket.create_connection(server.address, 10) for _ in range(300)]
    began = time.monotonic()
    sock, _ = prove(server.address)
    until(lambda: server.admitted, "the peer with the key")
    assert time.monotonic() - began < 1 and threading.active_count() == before
    assert all(closed(each) for each in crowd[:290])
    for each in (sock, *crowd):
        each.close()


def test_robust_srun_hears_an_agent_among_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """robust-srun held 3,000 for 10 s each; and asyncio accepts as many at once as may wait."""
    monkeypatch.setattr(framed, "STRANGERS", 16)

    async def scene() -> None:
        heard: list[object] = []
        open_: set[Connection] = set()
        server, port = await listen(KEY, lambda _, message: heard.append(message), open_.discard)
        loop = asyncio.get_running_loop()
        crowd = [await loop.run_in_executor(None, connect, port) for _ in range(50)]
        until_closed = [asyncio.to_thread(closed, each) for each in crowd[:34]]
        sock, codec = await asyncio.to_thread(prove, ("127.0.0.1", port), encode(hello()))
        began = time.monotonic()
        while not heard and time.monotonic() < began + 10:
            await asyncio.sleep(0.01)
        assert heard == [hello()]
        assert await asyncio.gather(*until_closed)
        assert codec.ready
        for each in (sock, *crowd):
            each.close()
        server.close()

    def connect(port: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), 10)

    asyncio.run(scene())


def hello() -> Hello:
    return Hello(1, "0", 0, "n0", (0,), 1, 1, 7000, 7001, 0, 0)
