"""Chunks that have not changed cross the network once, and only bytes decide which these are."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_stores import FakeRank, Proxy, at_port, flip, replicas, stores, target

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.store import shelf
from robust_slurm.checkpoint.store.events import AlarmEvent
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.checkpoint.transfer import incoming

CHUNK = 1 << 16
SIZE = 2_000_000
BASE = random.Random(1).randbytes(1_900_000)  # 95 % of a snapshot


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", CHUNK)


class Pair:
    """A rank, its store, and the one with its replica, by way of a wire that counts bytes."""

    def __init__(self, a: Store, b: Store) -> None:
        self.rank, self.b = FakeRank(a, 0), b
        self.proxy = Proxy(b.port, 1 << 40)
        a.place({0: at_port(self.proxy.port)})

    def save(self, step: int, frozen: bytes = BASE) -> int:
        """Save, and see that the replica is the same file. Returns the bytes on the wire."""
        before = self.proxy.passed
        data = self.rank.save(step, size=SIZE, frozen=frozen)
        self.rank.wait("kept", step=step)
        self.rank.wait("replicated", step=step)
        assert (0, step) in replicas(self.b)
        (found,) = [h for h in self.b.stock() if (h.owner, h.step) == (0, step)]
        assert (self.b.socket_path.parent / found.file).read_bytes() == data
        return self.proxy.passed - before


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        made = Pair(a, b)
        yield made
        made.proxy.close()


def test_what_does_not_change_is_sent_once(pair: Pair) -> None:
    assert pair.save(1) > SIZE
    for step in range(2, 9):  # what is trained, with the chunk at its end, and some messages
        assert pair.save(step) < (SIZE - len(BASE)) + 2 * CHUNK + 8000


def test_what_changes_and_comes_back_is_right_at_each_step(pair: Pair) -> None:
    """Three slots hold different histories then."""
    other = BASE[:700_000] + bytes([BASE[700_000] ^ 1]) + BASE[700_001:]
    moved = BASE[1_000_000:] + BASE[:1_000_000]
    for step, frozen in enumerate((BASE, other, BASE, BASE, other, moved, moved, BASE, other), 1):
        sent = pair.save(step, frozen)  # compares the files
        assert step != 7 or sent < 400_000


def test_an_equal_crc_is_no_proof(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were all CRCs equal, only the comparison of bytes could tell."""
    for module in (digest, incoming):
        monkeypatch.setattr(module, "crc32", lambda _data, crc=0: crc)
    other = BASE[:700_000] + bytes([BASE[700_000] ^ 1]) + BASE[700_001:]
    for step, frozen in enumerate((BASE, other, BASE, BASE, other), 1):
        pair.save(step, frozen)


def test_the_same_step_written_anew_into_its_own_file_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file would be compared with itself, and CRCs alone would decide."""
    for module in (digest, incoming):
        monkeypatch.setattr(module, "crc32", lambda _data, crc=0: crc)
    other = BASE[:700_000] + bytes([BASE[700_000] ^ 1]) + BASE[700_001:]
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in (3, 4, 5):
            rank.save(step, size=SIZE, frozen=BASE)
            rank.wait("replicated", step=step)
        rank.die()
        anew = FakeRank(a, 0)
        anew.wait("welcome")
        anew.say(op="began", step=4)
        data = anew.save(5, size=SIZE, frozen=other)
        anew.wait("replicated", step=5)
        (found,) = [h for h in b.stock() if (h.owner, h.step, h.ok) == (0, 5, True)]
        assert (b.socket_path.parent / found.file).read_bytes() == data


def test_a_comparison_that_takes_long_is_no_lost_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores(tmp_path, 2, patience=0.5) as [(a, events), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        rank.save(1, size=SIZE, frozen=BASE)
        rank.wait("replicated", step=1)
        real = digest.alike

        def slow(*given: object) -> list[int]:
            threading.Event().wait(0.8)  # longer than patience
            assert b._peers is not None
            for channel in list(b._peers._channels):
                channel.close()
            return real(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(digest, "alike", slow)
        rank.save(2, size=SIZE, frozen=BASE)
        rank.wait("replicated", step=2)
        assert events.of(AlarmEvent) == []


def test_a_replica_that_memory_has_changed_is_mended(pair: Pair) -> None:
    for step in (1, 2, 3):
        pair.save(step)
    for path in pair.b.socket_path.parent.glob("replica-0-*.safetensors"):
        flip(path, 1_000_000)
    for step in (4, 5, 6):
        assert pair.save(step) > CHUNK
    assert pair.save(7) < (SIZE - len(BASE)) + 2 * CHUNK + 8000


def test_replicas_that_are_gone_are_sent_whole(pair: Pair) -> None:
    for step in (1, 2, 3):
        pair.save(step)
    for path in pair.b.socket_path.parent.glob("replica-0-*.safetensors"):
        path.unlink()
    assert pair.save(4) > SIZE
    assert pair.save(5) < SIZE / 2


def test_another_peer_gets_all_of_it(tmp_path: Path) -> None:
    with stores(tmp_path, 3) as [(a, _), (b, _), (c, _)]:
        rank = FakeRank(a, 0)
        for step, peer in enumerate((b, b, c, c, b), 1):
            a.place({0: target(peer)})
            data = rank.save(step, size=SIZE, frozen=BASE)
            rank.wait("replicated", step=step)
            (found,) = [h for h in peer.stock() if (h.owner, h.step, h.ok) == (0, step, True)]
            assert (peer.socket_path.parent / found.file).read_bytes() == data


def test_a_snapshot_that_is_overwritten_meanwhile_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores(tmp_path, 1) as [(a, _)]:
        rank = FakeRank(a, 0)
        for step in (1, 2):
            rank.save(step, size=SIZE, frozen=BASE)
            rank.wait("kept", step=step)
        new, older = a._shelf.of(0, shelf.OWN)
        path = a.socket_path.parent / older.file
        real = digest.alike

        def while_written(*given: object) -> list[int]:
            found = real(*given)  # type: ignore[arg-type]
            with path.open("r+b") as file:
                file.write(bytes(8))
            return found

        with open(a._shelf.open(new), "rb") as file:
            assert len(a._shelf.unchanged(file.fileno(), new, older, 2)) >= len(BASE) // CHUNK - 1
            monkeypatch.setattr(digest, "alike", while_written)
            assert a._shelf.unchanged(file.fileno(), new, older, 2) == []
