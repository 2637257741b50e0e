"""Ranks that begin anew within an epoch: what they had saved is never mixed with what they save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import Events, FakeRank, replicas, stores, target
from torch_forks import TorchForks
from waiting import until

from robust_slurm.checkpoint.durable import tier
from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.planning.plan import Holder, Resume, Seat, plan
from robust_slurm.checkpoint.store.events import CommittedEvent, PersistedEvent
from robust_slurm.checkpoint.store.store import Store

SMALL = 100_000
Made = list[tuple[Store, Events]]


def _start(made: Made, seats: Sequence[int], **more: Any) -> list[FakeRank]:
    """Rank ``n`` runs at store ``seats[n]``."""
    ranks = [FakeRank(made[seat][0], n, world=2, **more) for n, seat in enumerate(seats)]
    for rank in ranks:
        rank.wait("welcome")
    return ranks


def _anew(
    made: Made, old: list[FakeRank], seats: Sequence[int], step: int, **more: Any
) -> list[FakeRank]:
    """Restart like a launcher and ranks that agree on the highest number of any store."""
    for rank in old:
        rank.die()
    ranks = _start(made, seats, **more)
    line = max(rank.wait("welcome")["line"] for rank in ranks)
    assert line > max(rank.line for rank in old)
    for rank in ranks:
        rank.begin(step, line)
    return ranks


def _digest(rank: FakeRank, step: int) -> list[int]:
    with (rank.directory / f"own-{rank.rank}-{step % 3}.safetensors").open("rb") as file:
        return digest.take(file.fileno(), file.seek(0, 2))


def _write(rank: FakeRank, events: Events, step: int) -> None:
    """The rank saves a durable step, and its part is on disk."""
    before = len(events.of(PersistedEvent))
    rank.save(step, size=SMALL, persist=True)
    until(lambda: len(events.of(PersistedEvent)) > before, f"step {step} written")
    assert events.of(PersistedEvent)[-1].ok, events


def _resume(made: Made, only: str = "") -> Resume:
    seats = {n: Seat(f"s{n}", f"n{n}") for n in range(2)}
    places = [
        Holder(f"s{n}", f"n{n}", "host", 1, [h for h in store.stock() if only in ("", h.tier)])
        for n, (store, _) in enumerate(made)
    ]
    return plan(places, seats, 2)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1], ids=["rank 0 had written", "rank 1 had written"])
def test_a_durable_step_is_never_made_of_two_timelines(
    tmp_path: Path, torch_forks: TorchForks, first: int
) -> None:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    more = {"directory": str(directory), "python": torch_forks.python}
    with stores(tmp_path, 2) as made:
        ranks = _start(made, (0, 1), **more)
        _write(ranks[first], made[first][1], 100)  # rank 0 then waits for rank 1's part
        ranks = _anew(made, ranks, (0, 1), 50, **more)
        for n in (1 - first, first):
            _write(ranks[n], made[n][1], 100)
        assert made[0][1].wait(CommittedEvent).ok
        path = tier.step_dir(directory, 100)
        manifest = tier.read_manifest(path)
        on_disk = [tier.read_rank(path, manifest, n).source for n in range(2)]
        assert on_disk == [_digest(rank, 100) for rank in ranks]


def test_ranks_that_change_places_leave_nothing_behind_that_is_resumed(tmp_path: Path) -> None:
    """torchrun with c10d numbers the nodes anew: no store has seen the rank that comes."""
    with stores(tmp_path, 2) as made:
        (a, _), (b, _) = made
        ranks = _start(made, (0, 1))
        a.place({0: target(b)})
        b.place({1: target(a)})
        for rank in ranks:
            for step in (98, 99, 100):
                rank.save(step, size=SMALL)
                rank.wait("replicated", step=step)
        ranks = _anew(made, ranks, (1, 0), 50)
        a.place({1: target(b)})
        b.place({0: target(a)})
        ranks[0].save(100, size=SMALL)
        ranks[0].wait("replicated", step=100)
        assert _resume(made).step == 0  # not step 100 of both times
        ranks[1].save(51, size=SMALL)
        ranks[1].wait("replicated", step=51)
        assert (replicas(a), replicas(b)) == ([(0, 100)], [(1, 51)])


def test_a_timeline_after_the_next_has_a_higher_number(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as made:
        ranks = _start(made, (0, 1))
        assert [rank.wait("welcome")["line"] for rank in ranks] == [0, 0]
        for seats in ((0, 1), (1, 0), (1, 0)):
            ranks = _anew(made, ranks, seats, 0)
