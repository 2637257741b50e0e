"""Ranks that begin anew within an epoch (torchrun): what they had saved after that is given up."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_stores import FakeRank, Proxy, at_port, replicas, stores, target
from waiting import until

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.planning.plan import Holder, Seat, plan
from robust_slurm.checkpoint.store.store import Store


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1 << 18)


def _save(rank: FakeRank, *steps: int, answer: str = "replicated") -> None:
    for step in steps:
        rank.save(step)
        rank.wait("kept", step=step)
        rank.wait(answer, step=step)


def _anew(store: Store, old: FakeRank) -> FakeRank:
    old.die()
    rank = FakeRank(store, old.rank, world=2)
    rank.wait("welcome")
    return rank


def _resume(*all_stores: Store) -> int:
    seats = {n: Seat(f"s{n}", f"n{n}") for n in range(2)}
    places = [
        Holder(f"s{n}", f"n{n}", "host", 1, store.stock()) for n, store in enumerate(all_stores)
    ]
    return plan(places, seats, 2).step


def test_nothing_that_was_given_up_is_sent_counted_or_resumed(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        ranks = [FakeRank(a, 0, world=2), FakeRank(b, 1, world=2)]
        a.place({0: target(b)})
        b.place({1: target(a)})
        for rank in ranks:
            _save(rank, 50, 99, 100)
        for store in (a, b):
            store.complete(100, 100)
        ranks = [_anew(store, rank) for store, rank in zip((a, b), ranks, strict=True)]
        assert _resume(a, b) == 100  # until it is known where they begin
        for rank in ranks:
            rank.begin(50)
        until(lambda: _resume(a, b) == 50, "50")
        for rank in ranks:
            _save(rank, 51)
            assert {m["step"] for m in rank.heard("replicated")} <= {50, 51}
            assert rank.heard("alone") == []
        assert replicas(b) == [(0, 50), (0, 51)]
        assert _resume(a, b) == 51


def test_two_times_are_never_combined_though_the_peers_do_not_reach_each_other(
    tmp_path: Path,
) -> None:
    with stores(tmp_path, 2, patience=0.5) as [(a, _), (b, _)]:
        proxy = Proxy(a.port, 1 << 40)
        ranks = [FakeRank(a, 0, world=2), FakeRank(b, 1, world=2)]
        b.place({1: at_port(proxy.port)})
        a.place({0: None})
        _save(ranks[0], 98, 99, 100, answer="alone")
        _save(ranks[1], 98, 99, 100)
        proxy.close()
        ranks = [_anew(store, rank) for store, rank in zip((a, b), ranks, strict=True)]
        for rank in ranks:
            rank.begin(0)
        _save(ranks[0], 98, 99, 100, answer="alone")
        _save(ranks[1], 98, 99, answer="alone")
        assert replicas(a) == []
        assert _resume(a, b) == 99


def test_a_rank_that_does_not_resume_begins_with_the_first_step_that_it_saves(
    tmp_path: Path,
) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0, world=2)
        a.place({0: target(b)})
        _save(rank, 7, 8, 9)
        rank = _anew(a, rank)
        _save(rank, 8)
        assert rank.heard("replicated", step=9) == []
        assert replicas(b) == [(0, 7), (0, 8)]


def test_a_rank_that_only_enrols_again_gives_nothing_up(tmp_path: Path) -> None:
    """The rank found that it no longer shares its state."""
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0, world=2)
        a.place({0: target(b)})
        _save(rank, 7, 8)
        rank.die()
        rank = FakeRank(a, 0, world=2, goes_on=True)
        rank.wait("replicated", step=8)
        rank.say(op="began", step=3)
        _save(rank, 9)
        assert replicas(b) == [(0, 7), (0, 8), (0, 9)]
