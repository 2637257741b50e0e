"""Replicas that are kept no more give back their memory, which a mapping alone would hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_stores import FakeRank, replicas, stores, target
from waiting import until

from robust_slurm.checkpoint.store.shelf import Shelf, ShelfRecord
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.checkpoint.transfer.channel import Channel
from robust_slurm.checkpoint.transfer.incoming import Incoming


def _kept(store: Store) -> tuple[int, int, int]:
    """Numbers of replicas on the shelf, of their files, and of those that are still mapped."""
    folder = store.socket_path.parent
    mapped = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if f"{folder}/replica-" in line
    ]
    return len(replicas(store)), len(list(folder.glob("replica-*"))), len(mapped)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_fewer_may_be_kept_while_one_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in (1, 2):
            rank.save(step)
            rank.wait("replicated", step=step)
        real = Incoming.receive

        def receive(incoming: Incoming, channel: Channel) -> None:
            b._peers.limit(limit)
            real(incoming, channel)

        monkeypatch.setattr(Incoming, "receive", receive)
        rank.save(3)
        rank.wait("replicated", step=3)
        until(lambda: _kept(b) == (limit, limit, limit), f"{_kept(b)}")


def test_replicas_of_a_rank_that_sends_elsewhere_leave_no_memory_behind(tmp_path: Path) -> None:
    with stores(tmp_path, 3) as [(a, _), (b, _), (c, _)]:
        rank, other = FakeRank(a, 0), FakeRank(b, 1)
        a.place({0: target(b)})
        for step in (1, 2, 3):
            rank.save(step)
            rank.wait("replicated", step=step)
        assert _kept(b) == (3, 3, 3)
        a.place({0: target(c)})
        for step in range(4, 10):
            other.save(step)
            other.wait("kept", step=step)
        until(lambda: _kept(b) == (0, 0, 0), f"{_kept(b)}")


def test_two_threads_may_remove_replicas_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of each rank of a store does so, and the one that hears robust-srun."""
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        rank.save(1)
        rank.wait("replicated", step=1)
        a.place({0: None})
        until(lambda: b._peers._pairs[0].channel is None, "nobody sends")
        real = Shelf.all

        def gone_meanwhile(shelf: Shelf) -> list[ShelfRecord]:
            found = real(shelf)
            for record in found:
                shelf.discard(record)
            return found

        monkeypatch.setattr(Shelf, "all", gone_meanwhile)
        b._peers.prune(9)
