"""The shim's loop and its sockets: slips of ours, strangers, and no file descriptor left."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest
from waiting import until

from robust_slurm.frames.wire import Codec
from srun_wrapper.agent import (
    loop,
    task_log,  # noqa: F401 - it writes the log on stderr
)
from srun_wrapper.agent.connections.guests import GuestLimits, Guests
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.messages import PeerAsk

KEY = bytes(range(32))


class KeptGuests(Guests):
    """Keeps all that were accepted."""

    links: list[Link]

    def admit(self, link: Link) -> None:
        self.links.append(link)
        super().admit(link)


class Host:
    """A listening socket in a loop, as an agent has it."""

    def __init__(self, most: int, seconds: float = 30.0) -> None:
        self.loop = Loop()
        self.links: list[Link] = []
        self.closed: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.guests = KeptGuests(
            self.loop,
            self.listener,
            KEY,
            lambda *_: None,
            lambda _link, why: self.closed.append(why),
            GuestLimits(most, seconds),
        )
        self.guests.links = self.links
        self.strangers: list[socket.socket] = []

    def connect(self) -> socket.socket:
        before = len(self.links)
        sock = socket.create_connection(self.listener.getsockname())
        self.strangers.append(sock)
        self.wait(lambda: len(self.links) > before)
        return sock

    def wait(self, ready: object) -> None:
        def turned() -> bool:
            self.loop.turn(0.02)
            return bool(ready())  # type: ignore[operator]

        until(turned, "what the loop is to do", every=0.0)

    def close(self) -> None:
        for sock in self.strangers:
            sock.close()
        for link in self.links:
            link.close()
        self.guests.close()


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    made = Host(3, getattr(request, "param", 30.0))
    yield made
    made.close()


def test_the_oldest_stranger_gives_way(host: Host) -> None:
    for _ in range(8):
        host.connect()
    assert [link.closed for link in host.links] == [True] * 5 + [False] * 3
    assert set(host.closed) == {"too many connections that do not authenticate"}


@pytest.mark.parametrize("host", [0.3], indirect=True)
def test_strangers_are_closed_in_time(host: Host) -> None:
    host.connect()
    host.wait(lambda: host.closed)
    assert host.closed == ["did not authenticate"]


@pytest.mark.parametrize("host", [0.3], indirect=True)
def test_who_only_introduces_himself_is_a_stranger(host: Host) -> None:
    """A preface needs no key: such connections stayed, and were not counted."""
    for _ in range(4):
        host.connect().sendall(Codec(b"x" * 32, server=False).preface())
    host.wait(lambda: len(host.closed) == 4)
    assert sorted(host.closed) == [
        *["did not authenticate"] * 3,
        "too many connections that do not authenticate",
    ]


@pytest.mark.parametrize("host", [0.3], indirect=True)
def test_peers_stay(host: Host) -> None:
    peers = [
        Link(
            host.loop,
            host.connect(),
            KEY,
            server=False,
            on_payload=lambda *_: None,
            on_close=lambda *_: None,
        )
        for _ in range(3)
    ]
    for peer in peers:
        peer.send(PeerAsk(1))
    host.wait(lambda: all(link.authenticated for link in host.links))
    for _ in range(6):
        host.connect()
    host.wait(lambda: len(host.closed) == 6)
    assert not any(peer.closed for peer in peers)


def test_no_file_descriptor_for_a_connection(
    host: Host, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    def accept(listener: socket.socket) -> object:
        if listener is host.listener:  # others' may be accepted from in threads
            tried.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(loop, "SPARED", 1.0)  # five turns of a busy machine take less
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", accept)
        host.strangers.append(socket.create_connection(host.listener.getsockname()))
        for _ in range(5):
            host.loop.turn(0.01)
        assert len(tried) == 1  # it does not spin
    host.wait(lambda: host.links)
    assert capfd.readouterr().err == ""


def test_a_slip_in_a_callback_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    one, calls = Loop(), list[str]()

    def fails(what: str) -> None:
        calls.append(what)
        raise RuntimeError("a slip of ours")

    for _ in range(3):
        one.later(0.0, lambda: fails("timer"))
        one.call(lambda: fails("call"))
    ours, theirs = socket.socketpair()
    one.watch(ours, lambda _mask: fails("socket"), write=False)
    theirs.send(b"x")
    one.later(0.0, lambda: calls.append("well"))
    for _ in range(4):
        one.turn(0.01)
    assert sorted(calls) == ["call"] * 3 + ["socket"] + ["timer"] * 3 + ["well"]
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("robust-task: internal error, continuing: RuntimeError in fails:")
    one.forget(ours)
    ours.close()
    theirs.close()


def test_a_forgotten_socket_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "SPARED", 0.02)
    one, calls = Loop(), list[int]()

    def fails(mask: int) -> None:
        calls.append(mask)
        raise OSError(os.strerror(errno.EMFILE))

    ours, theirs = socket.socketpair()
    one.watch(ours, fails, write=False)
    theirs.send(b"x")
    one.turn(1.0)
    one.forget(ours)
    ours.close()
    theirs.close()
    until(lambda: not one._timers or one.turn(0.05), "its time", every=0.0)
    assert len(calls) == 1
