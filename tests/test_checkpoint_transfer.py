"""The wire between two stores: framing, digests, resuming, and what is refused."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.checkpoint import digest, transfer
from robust_slurm.checkpoint.channel import BrokenError, Channel, number_list, numbers
from robust_slurm.checkpoint.incoming import Incoming
from robust_slurm.checkpoint.transfer import AbandonedError, Offer, Outgoing
from tests.waiting import until

KEY = b"k" * 32


def _pair(key: bytes = KEY, other: bytes = KEY, idle: float = 10.0) -> tuple[Channel, Channel]:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    return (
        Channel(client, key, server=False, idle=idle),
        Channel(server, other, server=True, idle=idle),
    )


def _in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except (BrokenError, AbandonedError, OSError) as err:
            results.append(err)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def _greeted(**options: Any) -> tuple[Channel, Channel]:
    a, b = _pair(**options)
    thread, _ = _in_thread(b.greet)
    a.greet()
    thread.join(10)
    return a, b


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1000)


def _offer(tmp_path: Path, size: int, name: str = "source") -> tuple[int, Offer, bytes]:
    data = os.urandom(size)
    (tmp_path / name).write_bytes(data)
    fd = os.open(tmp_path / name, os.O_RDONLY)
    return fd, Offer(3, 7, 4, (3,), 0, size, digest.take(fd, size)), data


def _send(channel: Channel, fd: int, offer: Offer, **more: Any) -> None:
    channel.send(offer.message("offer"))
    Outgoing(channel, fd, offer, **more).send(channel.receive())


def _take(channel: Channel, path: Path, incoming: Incoming | None = None) -> Incoming:
    offer = Offer.read(channel.receive())
    incoming = incoming or Incoming(path, offer, busy=lambda: channel.send({"op": "busy"}))
    incoming.receive(channel)
    channel.send({"op": "done"})
    return incoming


@pytest.mark.parametrize("size", [9, 999, 1000, 1001, 25_000])
@pytest.mark.parametrize(("mapped", "workers"), [(True, 1), (False, 1), (False, 2)])
def test_a_snapshot_arrives_whole(
    tmp_path: Path, size: int, mapped: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "workers", lambda _most: workers)
    a, b = _greeted()
    fd, offer, data = _offer(tmp_path, size)
    incoming = Incoming(tmp_path / "copy", offer, mapped=mapped)
    thread, result = _in_thread(lambda: _take(b, tmp_path / "copy", incoming))
    _send(a, fd, offer)
    thread.join(10)
    assert (tmp_path / "copy").read_bytes() == data
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    assert result[0].received == size


def test_the_file_is_torn_until_it_is_complete(tmp_path: Path) -> None:
    a, b = _greeted()
    fd, offer, _ = _offer(tmp_path, 5000)
    seen: list[bytes] = []

    def still(sent: int) -> str:
        if sent >= 4000:  # of which the receiver has at least the file itself
            seen.append((tmp_path / "copy").read_bytes()[:8])
        return ""

    thread, _ = _in_thread(lambda: _take(b, tmp_path / "copy"))
    _send(a, fd, offer, still=still)
    thread.join(10)
    assert seen == [bytes(8)]


def test_after_a_broken_connection_only_the_rest_is_sent(tmp_path: Path) -> None:
    fd, offer, data = _offer(tmp_path, 10_000)
    a, b = _greeted()
    incoming = Incoming(tmp_path / "copy", offer)
    thread, _ = _in_thread(lambda: (b.receive(), incoming.receive(b)))

    def breaks(sent: int) -> str:
        if sent == 6000:
            a.close()
        return ""

    with pytest.raises(BrokenError):
        _send(a, fd, offer, still=breaks)
    thread.join(10)
    rest = len(incoming.missing) * 1000
    assert 4000 <= rest < 10_000
    a, b = _greeted()
    before = incoming.received
    thread, _ = _in_thread(lambda: _take(b, tmp_path / "copy", incoming))
    _send(a, fd, offer)
    thread.join(10)
    assert incoming.received - before == rest
    assert (tmp_path / "copy").read_bytes() == data


def test_a_chunk_that_the_network_changed_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = _greeted()
    fd, offer, data = _offer(tmp_path, 5000)
    real, calls = Channel.receive_into, []

    def flips(self: Channel, view: memoryview) -> None:
        real(self, view)
        calls.append(len(view))
        if len(calls) == 3:
            view[0] ^= 1

    monkeypatch.setattr(Channel, "receive_into", flips)
    thread, _ = _in_thread(lambda: _take(b, tmp_path / "copy"))
    _send(a, fd, offer)
    thread.join(10)
    assert (tmp_path / "copy").read_bytes() == data
    assert sum(calls) == 6000  # one chunk more


def _early(offer: Offer) -> Offer:
    """As it is offered while its digest is being taken."""
    about = offer.message("offer")
    return Offer.read({**about, "needs": list(offer.needs), "digest": []})


def test_chunks_are_sent_while_the_digest_is_still_being_taken(tmp_path: Path) -> None:
    a, b = _greeted()
    fd, offer, data = _offer(tmp_path, 5000)
    sums = digest.Sums(offer.size)
    incoming = Incoming(tmp_path / "copy", _early(offer))
    thread, result = _in_thread(lambda: _take(b, tmp_path / "copy", incoming))
    sender, _ = _in_thread(lambda: _send(a, fd, _early(offer), sums=sums))
    for index, crc in enumerate(offer.digest):
        until(lambda index=index: len(incoming.missing) == 5 - index, f"{index} have arrived")
        sums.put(index, crc)
    until(lambda: not incoming.missing, "all have arrived")
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)  # the sender has not said that it ends
    assert thread.is_alive()
    sums.settle()
    sender.join(10)
    thread.join(10)
    assert (tmp_path / "copy").read_bytes() == data
    assert result[0].digest == offer.digest


def test_what_is_withdrawn_while_it_is_sent_never_becomes_complete(tmp_path: Path) -> None:
    a, b = _greeted()
    fd, offer, _ = _offer(tmp_path, 5000)
    sums = digest.Sums(offer.size)
    for index, crc in enumerate(offer.digest):
        sums.put(index, crc)
    thread, result = _in_thread(lambda: _take(b, tmp_path / "copy"))
    sender, sent = _in_thread(lambda: _send(a, fd, _early(offer), sums=sums))
    until(lambda: (tmp_path / "copy").exists(), "it is being received")
    sums.settle("torn")
    sender.join(10)
    thread.join(10)
    assert str(result[0]) == str(sent[0]) == "torn"
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)


def test_chunks_of_another_content_are_sent_again(tmp_path: Path) -> None:
    """Half of one content came, then the connection broke, then another one is offered."""
    fd, offer, _ = _offer(tmp_path, 5000)
    a, b = _greeted()
    incoming = Incoming(tmp_path / "copy", _early(offer))
    thread, _ = _in_thread(lambda: (b.receive(), incoming.receive(b)))

    def breaks(sent: int) -> str:
        if sent == 3000:
            until(lambda: len(incoming.missing) == 2, "it has arrived")
            a.close()
        return ""

    with pytest.raises(BrokenError):
        _send(a, fd, offer, still=breaks)
    thread.join(10)
    for again in (_early, lambda offer: offer):
        other, newer, data = _offer(tmp_path, 5000, "other")
        assert incoming.resume(again(newer))
        a, b = _greeted()
        thread, _ = _in_thread(partial(_take, b, tmp_path / "copy", incoming))
        _send(a, other, newer)
        thread.join(10)
        assert (tmp_path / "copy").read_bytes() == data


def test_a_chunk_is_held_against_the_crc_that_came_with_it(tmp_path: Path) -> None:
    a, b = _greeted()
    _, offer, data = _offer(tmp_path, 1500)
    thread, result = _in_thread(lambda: _take(b, tmp_path / "copy"))
    a.send(_early(offer).message("offer"))
    for _ in range(transfer.ROUNDS):
        chunks = a.receive()["chunks"]
        for index in chunks:
            a.send({"op": "chunk", "index": index, "crc": offer.digest[index] ^ (index == 1)})
            a._sock.sendall(data[index * 1000 : index * 1000 + 1000])
        a.send({"op": "end", "digest": offer.digest})
    assert chunks == [1]
    assert "chunk 1" in a.receive()["why"]
    thread.join(10)
    assert isinstance(result[0], AbandonedError)
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_fails_ends_the_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(digest, "workers", lambda _most: workers)
    a, b = _greeted()
    fd, offer, _ = _offer(tmp_path, 25_000)
    incoming = Incoming(tmp_path / "copy", offer, mapped=False)

    def full(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    thread, result = _in_thread(lambda: _take(b, tmp_path / "copy", incoming))
    _in_thread(lambda: _send(a, fd, offer))
    thread.join(10)
    assert isinstance(result[0], OSError)
    assert "No space" in str(result[0])
    assert not incoming.complete
    a.close()


def test_a_file_that_is_not_what_its_digest_says_is_never_taken(tmp_path: Path) -> None:
    a, b = _greeted()
    fd, offer, data = _offer(tmp_path, 5000)
    with (tmp_path / "source").open("r+b") as file:
        file.seek(2500)
        file.write(bytes([data[2500] ^ 4]))
    thread, result = _in_thread(lambda: _take(b, tmp_path / "copy"))
    with pytest.raises(AbandonedError, match=r"chunk 2 \(bytes 2000 to 2999\) differs"):
        _send(a, fd, offer)
    thread.join(10)
    assert isinstance(result[0], AbandonedError)
    assert "chunk 2" in str(result[0])
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)


def test_a_source_that_shrinks_ends_the_transfer(tmp_path: Path) -> None:
    a, b = _greeted()
    fd, offer, _ = _offer(tmp_path, 5000)
    os.truncate(tmp_path / "source", 1500)
    _in_thread(lambda: _take(b, tmp_path / "copy"))
    with pytest.raises(digest.FileChangedError):
        _send(a, fd, offer)
    a.close()


def test_room_is_taken_at_once_and_refused_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1 << 45)
    size = 1 << 50
    with pytest.raises(OSError, match="No space left"):
        Incoming(tmp_path / "copy", Offer(0, 1, 1, (), 0, size, []))
    assert not (tmp_path / "copy").exists()


def test_room_of_an_older_snapshot_is_used_again(tmp_path: Path) -> None:
    offer = Offer(3, 7, 4, (3,), 0, 5000, [0] * 5)
    first = Incoming(tmp_path / "copy", offer)
    second = Incoming(tmp_path / "copy", offer, first)
    assert (tmp_path / "copy").stat().st_ino == first.inode == second.inode
    other = Offer(3, 8, 4, (3,), 0, 6000, [0] * 6)
    third = Incoming(tmp_path / "copy", other, second)
    assert (tmp_path / "copy").stat().st_size == 6000
    third.close()


def test_a_peer_without_the_key_gets_nothing_and_says_nothing() -> None:
    a, b = _greeted(other=b"x" * 32)
    a.send({"op": "pull", "owner": 0, "step": 1})
    with pytest.raises(BrokenError, match="not authentic"):
        b.receive()


def test_a_silent_peer_is_left_after_its_time() -> None:
    _, b = _pair(idle=0.2)
    with pytest.raises(BrokenError):
        b.greet()


def test_close_wakes_a_thread_that_waits_for_ever() -> None:
    _, b = _greeted()
    thread, result = _in_thread(lambda: b.receive(forever=True))
    b.close()
    thread.join(10)
    assert isinstance(result[0], BrokenError)


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b'{"op":1}', b"\xff", b"[" * 5000])
def test_an_authentic_frame_that_is_no_message_breaks_the_connection(payload: bytes) -> None:
    a, b = _greeted()
    a._send(a._codec.seal(payload))
    with pytest.raises(BrokenError, match="not understood"):
        b.receive()


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_garbage_from_a_stranger_never_gets_through(garbage: bytes) -> None:
    a, b = _pair(idle=5.0)
    a._sock.sendall(garbage)
    a.close()
    with pytest.raises(BrokenError):
        b.greet()
        b.receive()
    a.release()
    b.release()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["owner", "step", "world", "epoch", "size", "digest",
                                        "needs"]), _JSON))  # fmt: skip
def test_an_odd_offer_is_refused_or_consistent(fields: dict[str, Any]) -> None:
    try:
        offer = Offer.read({"op": "offer", **fields})
    except BrokenError:
        return
    assert len(offer.digest) == digest.count(offer.size)
    assert offer.size > 8


def test_a_good_offer_survives_the_way() -> None:
    offer = Offer(3, 7, 4, (0, 3), 2, 2500, [1, 2, 0xFFFFFFFF])
    back = Offer.read({**offer.message("offer"), "needs": list(offer.needs)})
    assert back.same(offer)
    assert (back.world, back.needs) == (4, (0, 3))


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, 1 << 62])
def test_numbers_are_numbers(value: Any) -> None:
    with pytest.raises(BrokenError):
        numbers({"op": "x", "n": value}, "n")
    with pytest.raises(BrokenError):
        number_list({"op": "x", "n": [value]}, "n", 5, 10)


@pytest.mark.parametrize("chunks", [[9], [0, 0, 0, 0, 0, 0], "all", [-1]])
def test_a_receiver_that_asks_for_odd_chunks_is_left(tmp_path: Path, chunks: Any) -> None:
    a, b = _greeted(idle=1.0)
    fd, offer, _ = _offer(tmp_path, 5000)
    _in_thread(lambda: (b.receive(), b.send({"op": "go", "chunks": chunks})))
    with pytest.raises(BrokenError):
        _send(a, fd, offer)


@pytest.mark.parametrize("index", [5, 99])
def test_chunks_that_were_not_asked_for_are_not_taken(tmp_path: Path, index: int) -> None:
    a, b = _greeted()
    _, offer, _ = _offer(tmp_path, 5000)
    thread, result = _in_thread(lambda: _take(b, tmp_path / "copy"))
    a.send(offer.message("offer"))
    a.receive()
    a.send({"op": "chunk", "index": index, "crc": 0})
    thread.join(10)
    assert isinstance(result[0], BrokenError)


def test_a_sender_that_sends_nothing_does_not_hold_on_for_ever(tmp_path: Path) -> None:
    a, b = _greeted()
    _, offer, _ = _offer(tmp_path, 5000)
    thread, result = _in_thread(lambda: _take(b, tmp_path / "copy"))
    a.send(offer.message("offer"))
    for _ in range(transfer.ROUNDS):
        assert a.receive()["op"] == "go"
        a.send({"op": "end", "digest": offer.digest})
    assert a.receive()["op"] == "no"
    thread.join(10)
    assert isinstance(result[0], AbandonedError)
