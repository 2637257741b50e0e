"""Replicas that a new epoch keeps, and fetching between stores."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import (
    SIZE,
    FakeRank,
    Proxy,
    flip,
    refill,
    replicas,
    stores,
    target,
)
from waiting import until

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.store import awaited
from robust_slurm.checkpoint.store.events import (
    AlarmEvent,
    EnrolledEvent,
    FetchOutcome,
    Restore,
    WantedSnapshot,
)
from robust_slurm.checkpoint.store.store import Store
from robust_slurm.checkpoint.transfer import fetching


def _wanted(store: Store, owner: int, step: int) -> WantedSnapshot:
    return WantedSnapshot(owner, step, "127.0.0.1", store.port)


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1 << 18)


def test_replicas_outlive_the_owners_node_and_are_fetched_from_the_peer(tmp_path: Path) -> None:
    with stores(tmp_path, 3) as [(a, _), (b, _), (c, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in (1, 2):
            data = rank.save(step)
            rank.wait("replicated", step=step)
        a.close()
        (outcome,) = c.fetch([_wanted(b, 0, 2)])
        assert outcome._replace(seconds=0) == FetchOutcome(
            0, 2, True, "", "fetched-0-2.safetensors", 0, outcome.bytes
        )
        assert (c.socket_path.parent / outcome.file).read_bytes() == data
        assert [(h.tier, h.owner, h.step, h.ok) for h in c.stock()] == [("memory", 0, 2, True)]
        restore = Restore(2, "memory", {0: outcome.file})
        for store in (b, c):
            store.begin(1, restore)
        again = FakeRank(c, 0, epoch=1)
        assert again.wait("welcome")["restore"]["shards"] == {"0": outcome.file}
        assert replicas(b) == [(0, 1), (0, 2)]
        c.place({0: target(b)})
        again.save(3)
        again.wait("replicated", step=3)
        assert any(h.file == outcome.file for h in c.stock())
        again.save(4)
        again.wait("replicated", step=4)
        c.complete(3, 3)  # all ranks have a newer one
        until(lambda: not any(h.file == outcome.file for h in c.stock()), "fetched is removed")


def test_a_fetched_snapshot_is_replicated_before_the_first_save(tmp_path: Path) -> None:
    with stores(tmp_path, 3) as [(a, _), (b, _), (c, _)]:
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("kept", step=1)
        (outcome,) = b.fetch([_wanted(a, 0, 1)])
        for store in (b, c):
            store.begin(1, Restore(1, "memory", {0: outcome.file}))
        FakeRank(b, 0, epoch=1).wait("welcome")
        b.place({0: target(c)})
        until(lambda: replicas(c) == [(0, 1)], "the fetched one has a replica")


def test_a_new_epoch_drops_newer_replicas(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in (1, 2, 3):
            rank.save(step)
            rank.wait("replicated", step=step)
        b.begin(1, Restore(2, "memory", {}))
        assert replicas(b) == [(0, 1), (0, 2)]
        b.begin(2, None)
        assert b.stock() == []
        assert list(b.socket_path.parent.glob("*.safetensors")) == []


def test_a_replica_of_another_epoch_is_not_taken_until_the_peer_is_there_too(
    tmp_path: Path,
) -> None:
    with stores(tmp_path, 2, patience=1.0) as [(a, events), (b, _)]:
        a.begin(1, None)
        rank = FakeRank(a, 0, epoch=1)
        a.place({0: target(b)})
        rank.save(1)
        rank.wait("alone", step=1)
        assert "epoch 1, here it is 0" in events.wait(AlarmEvent).text
        assert b.stock() == []
        b.begin(1, None)
        rank.wait("replicated", step=1)


def test_replicas_of_an_owner_that_sends_elsewhere_go_when_they_are_no_use(
    tmp_path: Path,
) -> None:
    with stores(tmp_path, 3) as [(a, _), (b, _), (c, _)]:
        owner, local = FakeRank(a, 0), FakeRank(b, 1)
        a.place({0: target(b)})
        owner.save(1)
        owner.wait("replicated", step=1)
        a.place({0: target(c)})
        owner.save(2)
        owner.wait("replicated", step=2)
        for step in (1, 2, 3, 4, 5):
            local.save(step)
            local.wait("alone", step=step)
        assert replicas(b) == [(0, 1)]
        local.save(6)
        until(lambda: replicas(b) == [], "removed")


# -- fetching


def test_fetching_in_parallel_with_failures(tmp_path: Path) -> None:
    with stores(tmp_path, 4, patience=1.0) as [(a, _), (b, _), (c, _), (d, _)]:
        ranks = [FakeRank(a, 0), FakeRank(b, 1), FakeRank(c, 2)]
        for rank in ranks:
            rank.save(4)
            rank.wait("kept", step=4)
        flip(b.socket_path.parent / "own-1-1.safetensors", 2_000_000)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = closed.getsockname()[1]
        outcomes = d.fetch(
            [
                WantedSnapshot(3, 4, "127.0.0.1", nobody),
                _wanted(a, 0, 4),
                _wanted(b, 1, 4),
                _wanted(c, 2, 4),
                _wanted(c, 2, 5),
                _wanted(c, 9, 4),
            ]
        )
        assert [o.ok for o in outcomes] == [False, True, False, True, False, False]
        assert [(o.owner, o.step) for o in outcomes] == [
            (3, 4), (0, 4), (1, 4), (2, 4), (2, 5), (9, 4)
        ]  # fmt: skip
        assert "no process listens" in outcomes[0].why
        assert "differs from its digest" in outcomes[2].why
        assert "step 5 of rank 2 is not there" in outcomes[4].why
        assert sorted(p.name for p in d.socket_path.parent.glob("*f*")) == [
            "fetched-0-4.safetensors", "fetched-2-4.safetensors"
        ]  # fmt: skip
        assert [h.ok for h in b.stock()] == [False]


def test_a_fetch_starts_over_after_a_broken_connection(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        data = rank.save(1)
        rank.wait("kept", step=1)
        proxy = Proxy(a.port, SIZE // 2)
        threading.Thread(target=refill, args=(proxy,), daemon=True).start()
        (outcome,) = b.fetch([WantedSnapshot(0, 1, "127.0.0.1", proxy.port)])
        assert outcome.ok, outcome
        assert proxy.connections >= 2
        assert (b.socket_path.parent / outcome.file).read_bytes() == data
        proxy.close()


def test_a_link_that_breaks_every_fetch_is_given_up(tmp_path: Path) -> None:
    with stores(tmp_path, 2, patience=60.0) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("kept", step=1)
        proxy = Proxy(a.port, SIZE // 2, each=True)
        (outcome,) = b.fetch([WantedSnapshot(0, 1, "127.0.0.1", proxy.port)], 20.0)
        assert not outcome.ok
        assert proxy.connections == 3
        proxy.close()


@pytest.mark.parametrize("budget", [0, SIZE // 2])
def test_a_fetch_from_a_peer_that_hangs_ends(tmp_path: Path, budget: int) -> None:
    with stores(tmp_path, 2, patience=1.0) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("kept", step=1)
        proxy = Proxy(a.port, budget, cut=False)
        began = time.monotonic()
        (outcome,) = b.fetch([WantedSnapshot(0, 1, "127.0.0.1", proxy.port)])
        assert not outcome.ok
        assert time.monotonic() - began < 20
        assert list(b.socket_path.parent.glob("fetched*")) == []
        proxy.close()


def test_closing_ends_a_fetch(tmp_path: Path) -> None:
    with stores(tmp_path, 2, patience=60.0) as [(a, _), (b, _)]:
        proxy = Proxy(a.port, 0, cut=False)
        results: list[FetchOutcome] = []
        work = threading.Thread(
            target=lambda: results.extend(b.fetch([WantedSnapshot(0, 1, "127.0.0.1", proxy.port)]))
        )
        work.start()
        until(lambda: proxy.connections == 1, "connected")
        b.close()
        work.join(20)
        assert not work.is_alive()
        assert not results[0].ok
        proxy.close()


def test_what_was_fetched_is_not_fetched_again(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("kept", step=1)
        assert b.fetch([_wanted(a, 0, 1)])[0].bytes > SIZE
        assert b.fetch([_wanted(a, 0, 1)])[0]._replace(seconds=0) == FetchOutcome(
            0, 1, True, "", "fetched-0-1.safetensors", 0, 0
        )
        flip(b.socket_path.parent / "fetched-0-1.safetensors", 100_000)
        assert b.fetch([_wanted(a, 0, 1)])[0].bytes > SIZE
        assert all(h.ok for h in b.stock())


def _unexpected(store: Store, rank: int) -> FakeRank:
    """A rank comes up where the plan has nothing for it."""
    store.begin(1, Restore(2, "memory", {0: "own-0-2.safetensors"}))
    return FakeRank(store, rank, epoch=1)


def test_a_rank_that_was_not_expected_waits_for_its_snapshot(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, events)]:
        owner = FakeRank(a, 1)
        owner.save(2)
        owner.wait("kept", step=2)
        rank = _unexpected(b, 1)
        assert events.wait(EnrolledEvent).rank == 1  # so that robust-srun knows where it is
        assert not rank.heard("welcome")
        (outcome,) = b.fetch([_wanted(a, 1, 2)])
        shards = rank.wait("welcome")["restore"]["shards"]
        assert shards == {"0": "own-0-2.safetensors", "1": outcome.file}
        assert len(events.of(EnrolledEvent)) == 1
        FakeRank(b, 0, epoch=1).wait("welcome")


def test_a_rank_for_which_nothing_comes_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited, "ORDER", 0.3)
    monkeypatch.setattr(awaited, "TELL", 0.05)
    with stores(tmp_path, 1) as [(a, _)]:
        rank = _unexpected(a, 1)
        assert rank.wait("welcome")["restore"]["shards"] == {"0": "own-0-2.safetensors"}
        assert rank.heard("wait")


def test_a_rank_that_waits_ends_with_its_epoch(tmp_path: Path) -> None:
    with stores(tmp_path, 1) as [(a, events)]:
        rank = _unexpected(a, 1)
        events.wait(EnrolledEvent)
        a.begin(2, None)
        assert rank.ended.wait(10)
        assert not rank.heard("welcome")


def test_where_memory_is_short_own_snapshots_of_other_steps_give_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank, other = FakeRank(a, 0), FakeRank(b, 1)
        for step in (4, 5, 6):
            for each in (rank, other):
                each.save(step)
                each.wait("alone", step=step)
        rank.die()
        plenty, room = 10 * SIZE, list[int]()
        monkeypatch.setattr("robust_slurm.checkpoint.store.pruning.free", lambda _path: room.pop(0))
        for step, there, left in (
            (4, [plenty, plenty], {4, 5, 6}),
            (5, [0, plenty], {4, 5}),  # the newer one is incomplete, or it would be wanted
            (6, [0, 0], set[int]()),
        ):
            room[:] = there
            (outcome,) = a.fetch([WantedSnapshot(1, step, "127.0.0.1", b.port)])
            assert outcome.ok
            assert {h.step for h in a.stock() if h.owner == 0} == left


def test_two_recoveries_that_fetch_the_same_snapshot_do_not_harm_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was cut short by another fault, and its fetch went on: both lost the file."""
    begun, go_on = threading.Event(), threading.Event()
    receive = fetching.Incoming.receive

    def slowly(incoming: Any, channel: Any) -> None:
        if not begun.is_set():
            begun.set()
            go_on.wait(30)
        receive(incoming, channel)

    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        data = rank.save(1)
        rank.wait("kept", step=1)
        monkeypatch.setattr(fetching.Incoming, "receive", slowly)
        found: list[FetchOutcome] = []

        def fetch() -> None:
            found.extend(b.fetch([_wanted(a, 0, 1)]))

        threads = [threading.Thread(target=fetch) for _ in range(2)]
        threads[0].start()
        assert begun.wait(10)
        threads[1].start()
        threads[1].join(0.2)
        go_on.set()
        for thread in threads:
            thread.join(30)
        assert [outcome.ok for outcome in found] == [True, True]
        assert (b.socket_path.parent / found[0].file).read_bytes() == data
        assert [path.name for path in b.socket_path.parent.glob("fetched*")] == [found[0].file]
