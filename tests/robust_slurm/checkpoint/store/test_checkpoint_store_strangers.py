"""A store's port on the network: strangers, and peers that are no friends."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest
from checkpoint_stores import (
    KEY,
    FakeRank,
    stores,
)
from waiting import until

from robust_slurm.checkpoint.store.events import AlarmEvent
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.checkpoint.transfer.channel import Channel, connect


def _channel(store: Store, key: bytes = KEY) -> Channel:
    return connect("127.0.0.1", store.port, key, 5.0)


def test_strangers_get_nothing(tmp_path: Path) -> None:
    with stores(tmp_path, 1) as [(a, events)]:
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("kept", step=1)
        stranger = _channel(a, b"x" * 32)
        stranger.send({"op": "pull", "owner": 0, "step": 1})
        with pytest.raises(Exception, match=r"closed|reset"):
            stranger.receive()
        with socket.create_connection(("127.0.0.1", a.port)) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            sock.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while sock.recv(1000):
                    pass
        rank.save(2)
        rank.wait("kept", step=2)
        assert events.of(AlarmEvent) == []


@pytest.mark.parametrize("whose", ["ckpt-rank", "ckpt-peer"])
def test_where_no_thread_can_be_had_a_connection_is_closed_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """The thread that accepts ended: later ranks were not served, and files were left."""
    start, refused = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if thread.name == whose and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with stores(tmp_path, 1) as [(a, _events)]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", limited)
            with contextlib.suppress(Exception):
                if whose == "ckpt-rank":
                    FakeRank(a, 0).save(1)
                else:
                    peer = _channel(a)  # it has the key; the thread comes with its first words
                    peer.send({"op": "pull", "owner": 0, "step": 1})
                    peer.receive()
            until(lambda: bool(refused), "the connection that gets no thread")
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("kept", step=1)
        _channel(a).close()


@pytest.mark.parametrize(
    "message",
    [
        {"op": "push", "owner": -1, "epoch": 0},
        {"op": "push", "owner": "../../x", "epoch": 0},
        {"op": "push"},
        {"op": "pull", "owner": 0, "step": None},
        {"op": "dance"},
    ],
)
def test_peers_that_talk_nonsense_are_left(tmp_path: Path, message: dict[str, object]) -> None:
    with stores(tmp_path, 1) as [(a, _)]:
        channel = _channel(a)
        channel.send(message)
        with pytest.raises(Exception, match=r"closed|reset"):
            channel.receive()
        assert a.stock() == []


def test_an_offer_for_another_owner_is_not_taken(tmp_path: Path) -> None:
    with stores(tmp_path, 1) as [(a, _)]:
        channel = _channel(a)
        channel.send({"op": "push", "owner": 0, "epoch": 0})
        assert channel.receive()["op"] == "ready"
        channel.send({"op": "offer", "owner": 1, "step": 1, "world": 2, "needs": [], "epoch": 0,
                      "size": 100, "digest": [1], "marks": []})  # fmt: skip
        with pytest.raises(Exception, match=r"closed|reset"):
            channel.receive()
        assert list(a.socket_path.parent.glob("replica*")) == []


def test_a_newer_connection_of_an_owner_takes_over(tmp_path: Path) -> None:
    with stores(tmp_path, 1) as [(a, _)]:
        first = _channel(a)
        first.send({"op": "push", "owner": 0, "epoch": 0})
        assert first.receive()["op"] == "ready"
        second = _channel(a)
        second.send({"op": "push", "owner": 0, "epoch": 0})
        assert second.receive()["op"] == "ready"
        with pytest.raises(Exception, match=r"closed|reset"):
            first.receive()
