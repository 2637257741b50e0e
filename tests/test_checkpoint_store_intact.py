"""A replica is what its owner saved: nothing torn, overwritten or flipped becomes one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from robust_slurm.checkpoint import digest
from robust_slurm.checkpoint.events import Alarm
from tests.checkpoint_stores import (
    SIZE,
    FakeRank,
    flip,
    replicas,
    stores,
    target,
)
from tests.waiting import until


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1 << 18)


def test_a_replica_that_was_cut_short_is_in_the_stock_as_bad(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in (1, 2):
            rank.save(step)
            rank.wait("replicated", step=step)
        (file,) = [h.file for h in b.stock() if h.step == 1]
        os.truncate(b.socket_path.parent / file, 5000)
        assert (replicas(b), replicas(b, ok=False)) == ([(0, 2)], [(0, 1)])
        for step in (3, 4):  # it is replaced like any other
            rank.save(step)
            rank.wait("replicated", step=step)
        assert (replicas(b), replicas(b, ok=False)) == ([(0, 2), (0, 3), (0, 4)], [])


def test_a_replica_is_sent_while_its_digest_is_taken_but_counts_only_when_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go = digest.take, threading.Event()

    def slow(fd: int, size: int, threads: int, sums: digest.Sums) -> list[int]:
        crcs = real(fd, size, threads, sums)
        go.wait(20)
        return crcs

    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        rank.wait("welcome")
        monkeypatch.setattr(digest, "take", slow)
        data = rank.save(1)
        replica = b.socket_path.parent / "replica-0-0.safetensors"
        until(lambda: replica.exists() and replica.read_bytes()[8:] == data[8:], "it is sent")
        assert replica.read_bytes()[:8] == bytes(8)
        assert rank.heard("kept") == rank.heard("replicated") == []
        go.set()
        rank.wait("replicated", step=1)
        ops = [m["op"] for m in rank.messages]
        assert ops.index("kept") < ops.index("replicated")
        assert replica.read_bytes() == data
        assert replicas(b) == [(0, 1)]


def test_a_slot_that_is_torn_while_it_is_digested_never_becomes_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = digest.take

    def torn(fd: int, size: int, threads: int, sums: digest.Sums) -> list[int]:
        crcs = real(fd, size, threads, sums)
        with (a.socket_path.parent / "own-0-1.safetensors").open("r+b") as file:
            file.write(bytes(8))
        return crcs

    with stores(tmp_path, 2) as [(a, events), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        rank.wait("welcome")
        monkeypatch.setattr(digest, "take", torn)
        rank.save(1)
        assert "torn" in rank.wait("unkept", step=1)["why"]
        monkeypatch.setattr(digest, "take", real)
        rank.save(2)
        rank.wait("replicated", step=2)
        assert [(h.step, h.ok) for h in b.stock()] == [(2, True)]
        assert events.of(Alarm) == []


def test_a_slot_that_is_overwritten_while_it_is_sent_never_becomes_a_replica(
    tmp_path: Path,
) -> None:
    """A rank that breaks all rules: it does not look at ``held``."""
    with stores(tmp_path, 2, bandwidth=SIZE * 2.0) as [(a, events), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in range(1, 9):
            rank.save(step, slot=0)
            rank.wait("kept", step=step)
        rank.wait("replicated", step=8)
        found = b.stock()
        assert all(h.ok for h in found)
        assert (0, 8) in [(h.owner, h.step) for h in found]
        assert events.of(Alarm) == []


def test_a_bit_that_flips_before_it_is_sent_is_found_by_the_owner(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, events), (b, _)]:
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("alone", step=1)
        flip(a.socket_path.parent / "own-0-1.safetensors", 1_000_000)
        a.place({0: target(b)})
        assert "differs from its digest" in events.wait(Alarm).text
        assert [h.ok for h in a.stock()] == [False]
        assert replicas(b) == []
        rank.save(2)
        rank.wait("replicated", step=2)
