"""A snapshot on its way between two stores: it arrives whole, also after a break, or fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from transfer_pairs import greeted, in_thread, offer_of, send, take

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.transfer import sending
from robust_slurm.checkpoint.transfer.channel import BrokenError, Channel
from robust_slurm.checkpoint.transfer.incoming import Incoming
from robust_slurm.checkpoint.transfer.sending import AbandonedError, Offer


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1000)


@pytest.mark.parametrize("size", [9, 999, 1000, 1001, 25_000])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_snapshot_arrives_whole(tmp_path: Path, size: int, mapped: bool) -> None:
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


@pytest.mark.parametrize("mapped", [True, False])
def test_after_a_broken_connection_it_starts_over(tmp_path: Path, mapped: bool) -> None:
    """The transfer starts over where another content of the same step is offered then, too."""
    fd, offer, _ = offer_of(tmp_path, 10_000)
    a, b = greeted()
    incoming = Incoming(tmp_path / "copy", offer, mapped=mapped)
    thread, broke = in_thread(lambda: (b.receive(), incoming.receive(b)))

    def breaks(sent: int) -> str:
        if sent == 6000:
            a.close()
        return ""

    with pytest.raises(BrokenError):
        send(a, fd, offer, still=breaks)
    thread.join(10)
    assert isinstance(broke[0], BrokenError)
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)
    other, newer, data = offer_of(tmp_path, 10_000, "other")
    incoming = Incoming(tmp_path / "copy", newer, incoming, mapped=mapped)
    a, b = greeted()
    thread, _ = in_thread(lambda: take(b, tmp_path / "copy", incoming))
    send(a, other, newer)
    thread.join(10)
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


def test_a_chunk_that_stays_wrong_ends_it(tmp_path: Path) -> None:
    a, b = greeted()
    _, offer, data = offer_of(tmp_path, 1500)
    damaged = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]
    thread, result = in_thread(lambda: take(b, tmp_path / "copy"))
    a.send(offer.message("offer"))
    for _ in range(sending.ROUNDS):
        chunks = a.receive()["chunks"]
        for index in chunks:
            a.send({"op": "chunk", "index": index})
            a._sock.sendall(damaged[index * 1000 :][:1000])
        a.send({"op": "end"})
    assert chunks == [1]
    assert "chunk 1" in a.receive()["why"]
    thread.join(10)
    assert isinstance(result[0], AbandonedError)
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)


@pytest.mark.parametrize("sent", [["end"], [0, 0], [5], [0, "drop"], [0, "end"]])
def test_a_sender_that_breaks_the_rules_gets_nowhere(tmp_path: Path, sent: list[Any]) -> None:
    a, b = greeted()
    _, offer, data = offer_of(tmp_path, 1500)
    thread, result = in_thread(lambda: take(b, tmp_path / "copy"))
    a.send(offer.message("offer"))
    a.receive()
    for each in sent:
        if isinstance(each, str):
            a.send({"op": each, "why": "no"})
        else:
            a.send({"op": "chunk", "index": each})
            a._sock.sendall(data[each * 1000 :][:1000])
    thread.join(10)
    assert isinstance(result[0], AbandonedError if "drop" in sent else BrokenError)
    assert (tmp_path / "copy").read_bytes()[:8] == bytes(8)


def test_a_disk_that_fails_ends_the_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
