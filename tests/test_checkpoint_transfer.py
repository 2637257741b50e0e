"""A snapshot on its way between two stores: it arrives whole, goes on after a break, or fails."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from transfer_pairs import greeted, in_thread, offer_of, send, take

from robust_slurm.checkpoint import digest, transfer
from robust_slurm.checkpoint.channel import BrokenError, Channel
from robust_slurm.checkpoint.incoming import Incoming
from robust_slurm.checkpoint.transfer import AbandonedError, Offer
from tests.waiting import until


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1000)


@pytest.mark.parametrize("size", [9, 999, 1000, 1001, 25_000])
@pytest.mark.parametrize(("mapped", "workers"), [(True, 1), (False, 1), (False, 2)])
def test_a_snapshot_arrives_whole(
    tmp_path: Path, size: int, mapped: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "workers", lambda _most: workers)
    a, b = greeted()
    fd, offer, data = offer_of(tmp_path, size)
    incoming = Incoming(tmp_path / "copy", offer, mapped=mapped)
    thread, result = in_thread(lambda: take(b, tmp_path / "copy", incoming))
    send(a, fd, offer)
    thread.join(10)
    assert (tmp_path / "copy").read_bytes() == data
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    assert result[0].received == size


def test_the_file_is_torn_until_it_is_complete(tmp_path: Path) -> None:
    a, b = greeted()
    fd, offer, _ = offer_of(tmp_path, 5000)
    seen: list[bytes] = []

    def still(sent: int) -> str:
        if sent >= 4000:  # of which the receiver has at least the file itself
            seen.append((tmp_path / "copy").read_bytes()[:8])
        return ""

    thread, _ = in_thread(lambda: take(b, tmp_path / "copy"))
    send(a, fd, offer, still=still)
    thread.join(10)
    assert seen == [bytes(8)] * 2  # before the last chunk and before the end


def test_after_a_broken_connection_only_the_rest_is_sent(tmp_path: Path) -> None:
    fd, offer, data = offer_of(tmp_path, 10_000)
    a, b = greeted()
    incoming = Incoming(tmp_path / "copy", offer)
    thread, _ = in_thread(lambda: (b.receive(), incoming.receive(b)))

    def breaks(sent: int) -> str:
        if sent == 6000:
            a.close()
        return ""

    with pytest.raises(BrokenError):
        send(a, fd, offer, still=breaks)
    thread.join(10)
    rest = len(incoming.missing) * 1000
    assert 4000 <= rest < 10_000
    a, b = greeted()
    before = incoming.received
    thread, _ = in_thread(lambda: take(b, tmp_path / "copy", incoming))
    send(a, fd, offer)
    thread.join(10)
    assert incoming.received - before == rest
    assert (tmp_path / "copy").read_bytes() == data


def test_a_chunk_that_the_network_changed_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = greeted()
    fd, offer, data = offer_of(tmp_path, 5000)
    real, calls = Channel.receive_into, []

    def flips(self: Channel, view: memoryview) -> None:
        real(self, view)
        calls.append(len(view))
        if len(calls) == 3:
            view[0] ^= 1

    monkeypatch.setattr(Channel, "receive_into", flips)
    thread, _ = in_thread(lambda: take(b, tmp_path / "copy"))
    send(a, fd, offer)
    thread.join(10)
    assert (tmp_path / "copy").read_bytes() == data
    assert sum(calls) == 6000  # one chunk more


def _early(offer: Offer) -> Offer:
    """As it is offered while its digest is being taken."""
    about = offer.message("offer")
    return Offer.read({**about, "needs": list(offer.needs), "digest": []})


def test_chunks_are_sent_while_the_digest_is_still_being_taken(tmp_path: Path) -> None:
    a, b = greeted()
    fd, offer, data = offer_of(tmp_path, 5000)
    sums = digest.Sums(offer.size)
    incoming = Incoming(tmp_path / "copy", _early(offer))
    thread, result = in_thread(lambda: take(b, tmp_path / "copy", incoming))
    sender, _ = in_thread(lambda: send(a, fd, _early(offer), sums=sums))
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
    a, b = greeted()
    fd, offer, _ = offer_of(tmp_path, 5000)
    sums = digest.Sums(offer.size)
    for index, crc in enumerate(offer.digest):
        sums.put(index, crc)
    thread, result = in_thread(lambda: take(b, tmp_path / "copy"))
    sender, sent = in_thread(lambda: send(a, fd, _early(offer), sums=sums))
    until(lambda: (tmp_path / "copy").exists(), "it is being received")
    sums.settle("torn")
    sender.join(10)
    thread.join(10)
    assert str(result[0]) == str(sent[0]) == "torn"
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)


def test_chunks_of_another_content_are_sent_again(tmp_path: Path) -> None:
    """Half of one content came, then the connection broke, then another one is offered."""
    fd, offer, _ = offer_of(tmp_path, 5000)
    a, b = greeted()
    incoming = Incoming(tmp_path / "copy", _early(offer))
    thread, _ = in_thread(lambda: (b.receive(), incoming.receive(b)))

    def breaks(sent: int) -> str:
        if sent == 3000:
            until(lambda: len(incoming.missing) == 2, "it has arrived")
            a.close()
        return ""

    with pytest.raises(BrokenError):
        send(a, fd, offer, still=breaks)
    thread.join(10)
    for again in (_early, lambda offer: offer):
        other, newer, data = offer_of(tmp_path, 5000, "other")
        assert incoming.resume(again(newer))
        a, b = greeted()
        thread, _ = in_thread(partial(take, b, tmp_path / "copy", incoming))
        send(a, other, newer)
        thread.join(10)
        assert (tmp_path / "copy").read_bytes() == data


def test_a_chunk_is_held_against_the_crc_that_came_with_it(tmp_path: Path) -> None:
    a, b = greeted()
    _, offer, data = offer_of(tmp_path, 1500)
    thread, result = in_thread(lambda: take(b, tmp_path / "copy"))
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
    a, b = greeted()
    fd, offer, _ = offer_of(tmp_path, 25_000)
    incoming = Incoming(tmp_path / "copy", offer, mapped=False)

    def full(*_arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    thread, result = in_thread(lambda: take(b, tmp_path / "copy", incoming))
    in_thread(lambda: send(a, fd, offer))
    thread.join(10)
    assert isinstance(result[0], OSError)
    assert "No space" in str(result[0])
    assert not incoming.complete
    a.close()


def test_a_file_that_is_not_what_its_digest_says_is_never_taken(tmp_path: Path) -> None:
    a, b = greeted()
    fd, offer, data = offer_of(tmp_path, 5000)
    with (tmp_path / "source").open("r+b") as file:
        file.seek(2500)
        file.write(bytes([data[2500] ^ 4]))
    thread, result = in_thread(lambda: take(b, tmp_path / "copy"))
    with pytest.raises(AbandonedError, match=r"chunk 2 \(bytes 2000 to 2999\) differs"):
        send(a, fd, offer)
    thread.join(10)
    assert isinstance(result[0], AbandonedError)
    assert "chunk 2" in str(result[0])
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)


def test_a_source_that_shrinks_ends_the_transfer(tmp_path: Path) -> None:
    a, b = greeted()
    fd, offer, _ = offer_of(tmp_path, 5000)
    os.truncate(tmp_path / "source", 1500)
    in_thread(lambda: take(b, tmp_path / "copy"))
    with pytest.raises(digest.FileChangedError):
        send(a, fd, offer)
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
