"""A replica is what its owner saved: nothing torn, overwritten or flipped becomes one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_stores import (
    SIZE,
    FakeRank,
    flip,
    replicas,
    stores,
    target,
)

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.store.events import AlarmEvent


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


def test_a_slot_that_is_torn_while_it_is_digested_never_becomes_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = digest.take

    def torn(fd: int, size: int, threads: int) -> list[int]:
        crcs = real(fd, size, threads)
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
        assert events.of(AlarmEvent) == []


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
        assert events.of(AlarmEvent) == []


def test_a_bit_that_flips_before_it_is_sent_is_found_by_the_owner(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, events), (b, _)]:
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("alone", step=1)
        flip(a.socket_path.parent / "own-0-1.safetensors", 1_000_000)
        a.place({0: target(b)})
        assert "differs from its digest" in events.wait(AlarmEvent).text
        assert [h.ok for h in a.stock()] == [False]
        assert replicas(b) == []
        rank.save(2)
        rank.wait("replicated", step=2)
