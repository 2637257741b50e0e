"""Replicas and fetches between stores, over real sockets, with peers that lag, break and die."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from checkpoint_stores import (
    SIZE,
    FakeRank,
    Proxy,
    at_port,
    refill,
    replicas,
    stores,
    target,
)
from waiting import until

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.planning.plan import Holder, usable
from robust_slurm.checkpoint.store.events import AlarmEvent, Holding, SavedEvent

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1 << 18)


def test_every_snapshot_goes_to_the_peer_which_keeps_the_newest_three(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, events), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in range(1, 8):
            data = rank.save(step)
            rank.wait("kept", step=step)
            rank.wait("replicated", step=step)
        assert replicas(b) == [(0, 5), (0, 6), (0, 7)]
        copies = [p.read_bytes() for p in b.socket_path.parent.glob("replica-0-*.safetensors")]
        assert data in copies
        assert rank.heard("alone", step=7) == []
        assert events.wait(SavedEvent, lambda e: e.replicated == 7).step == 7


def test_a_replica_has_all_that_the_plan_needs(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        a.begin(2, None)
        b.begin(2, None)
        rank = FakeRank(a, 3, epoch=2, needs=[1])
        a.place({3: target(b)})
        rank.save(9)
        rank.wait("replicated", step=9)
        (held,) = b.stock()
        assert held._replace(size=0) == Holding(
            3, 9, 4, (1, 3), "replica", "replica-3-0.safetensors", 0, True, "", 2
        )


def test_a_withdrawn_snapshot_is_withdrawn_at_the_peer_too(tmp_path: Path) -> None:
    """The peer keeps one whose file alone could not be read: its replica may be what is left."""
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in (1, 2, 3):
            rank.save(step)
            rank.wait("replicated", step=step)
        for step, more in ((1, {}), (3, {"torn": True})):
            file = f"own-0-{step % 3}.safetensors"
            rank.say(op="unusable", step=step, file=file, why="swapped", **more)
        until(lambda: replicas(b) == [(0, 1), (0, 2)], "step 3 is no good at the peer")
        found = usable(
            [Holder("a", "n0", "", 0, a.stock()), Holder("b", "n1", "", 0, b.stock())], 4
        )
        assert sorted(step for step, _ in found[0]) == [1, 2]
        rank.save(4)
        rank.wait("replicated", step=4)
        assert replicas(b) == [(0, 1), (0, 2), (0, 4)]  # in its place


def test_a_rank_without_a_place_is_alone_and_what_it_has_is_sent_once_placed(
    tmp_path: Path,
) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        rank.save(1)
        rank.wait("alone", step=1)
        a.place({0: target(b)})
        rank.wait("replicated", step=1)
        a.place({0: None})
        rank.save(2)
        rank.wait("alone", step=2)
        assert replicas(b) == [(0, 1)]


def test_places_are_kept_for_ranks_that_come_later(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        a.place({5: target(b)})
        rank = FakeRank(a, 5, world=8)
        rank.save(1)
        rank.wait("replicated", step=1)


def test_several_ranks_of_a_store_and_both_ways_at_once(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        ranks = [FakeRank(a, 0), FakeRank(a, 1), FakeRank(b, 2), FakeRank(b, 3)]
        a.place({0: target(b), 1: target(b)})
        b.place({2: target(a), 3: target(a)})
        for step in (1, 2):
            for rank in ranks:
                rank.save(step)
            for rank in ranks:
                rank.wait("replicated", step=step)
        assert replicas(b) == [(0, 1), (0, 2), (1, 1), (1, 2)]
        assert replicas(a) == [(2, 1), (2, 2), (3, 1), (3, 2)]


def test_a_broken_transfer_starts_over(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        proxy = Proxy(b.port, SIZE // 2)
        rank = FakeRank(a, 0)
        a.place({0: at_port(proxy.port)})
        rank.wait("welcome")
        threading.Thread(target=refill, args=(proxy,), daemon=True).start()
        rank.save(1)
        rank.wait("replicated", step=1)
        assert replicas(b) == [(0, 1)]
        assert proxy.connections >= 2
        proxy.close()


def test_a_dead_peer_costs_a_bounded_wait_once_and_one_alarm(tmp_path: Path) -> None:
    with stores(tmp_path, 2, patience=1.0) as [(a, events), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        rank.save(1)
        rank.wait("replicated", step=1)
        b.close()
        rank.save(2)
        rank.wait("alone", step=2)
        alarm = events.wait(AlarmEvent)
        assert alarm.rank == 0
        assert "rank 1 on peer" in alarm.text
        for step in (3, 4, 5):
            rank.save(step)
            rank.wait("alone", step=step)
        assert len(events.of(AlarmEvent)) == 1


def test_a_peer_that_hangs_counts_as_lost(tmp_path: Path) -> None:
    with stores(tmp_path, 2, patience=1.0) as [(a, events), (b, _)]:
        proxy = Proxy(b.port, SIZE // 2, cut=False)
        rank = FakeRank(a, 0)
        a.place({0: at_port(proxy.port)})
        rank.save(1)
        rank.wait("alone", step=1)
        text = events.wait(AlarmEvent).text
        assert "nothing moved" in text or "no whole" in text
        began = time.monotonic()
        a.close()
        assert time.monotonic() - began < 5
        proxy.close()


def test_a_link_that_breaks_every_transfer_counts_as_lost(tmp_path: Path) -> None:
    """However much of each comes through."""
    with stores(tmp_path, 2, patience=1.0) as [(a, events), (b, _)]:
        proxy = Proxy(b.port, SIZE // 2, each=True)
        rank = FakeRank(a, 0)
        a.place({0: at_port(proxy.port)})
        rank.save(1)
        rank.wait("alone", step=1)
        proxy.each, proxy.budget = False, 1 << 40
        rank.wait("replicated", step=1)
        assert len(events.of(AlarmEvent)) == 1
        proxy.close()


def test_a_peer_that_comes_back_gets_the_newest(tmp_path: Path) -> None:
    with stores(tmp_path, 2, patience=2.0) as [(a, events), (b, _)]:
        proxy = Proxy(b.port, 0)
        rank = FakeRank(a, 0)
        a.place({0: at_port(proxy.port)})
        for step in (1, 2, 3):
            rank.save(step)
            rank.wait("alone", step=step)
        proxy.budget = 1 << 40
        rank.wait("replicated", step=3)
        assert replicas(b) == [(0, 3)]
        rank.save(4)
        rank.wait("replicated", step=4)
        assert rank.heard("alone", step=4) == []
        assert len(events.of(AlarmEvent)) == 1
        proxy.close()


def test_a_full_peer_refuses_clearly_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, at: int, count: int) -> None:
        raise OSError(28, "No space left on device")

    with stores(tmp_path, 2) as [(a, events), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        monkeypatch.setattr("os.posix_fallocate", full)
        for step in (1, 2, 3):
            rank.save(step)
            rank.wait("alone", step=step)
        (alarm,) = events.of(AlarmEvent)
        assert "is full" in alarm.text and "bytes are needed" in alarm.text
        assert list(b.socket_path.parent.glob("replica-*")) == []


def test_a_new_placement_is_served_at_once_although_the_old_peer_hangs(tmp_path: Path) -> None:
    with stores(tmp_path, 3, patience=20.0) as [(a, _), (b, _), (c, _)]:
        proxy = Proxy(b.port, 0, cut=False)
        rank = FakeRank(a, 0)
        a.place({0: at_port(proxy.port)})
        rank.save(1)
        rank.wait("kept", step=1)
        until(lambda: proxy.connections == 1, "the old peer is being asked")
        a.place({0: target(c)})
        rank.wait("replicated", step=1)
        assert replicas(c) == [(0, 1)]
        proxy.close()


def test_while_a_peer_lags_the_slot_that_is_sent_is_held_and_the_newest_follows(
    tmp_path: Path,
) -> None:
    with stores(tmp_path, 2, bandwidth=SIZE * 0.4) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        rank.wait("welcome")
        rank.save(1)  # 2.5 s
        rank.wait("kept", step=1)
        rank.save(2)
        rank.wait("kept", step=2)
        rank.save(3)
        assert rank.wait("kept", step=3)["held"] == [1]
        rank.wait("replicated", step=1)  # never given up: the peer had nothing
        rank.wait("held", slots=[])
        rank.wait("replicated", step=3)
        assert rank.heard("replicated", step=2) == []
        assert replicas(b) == [(0, 1), (0, 3)]


def test_bandwidth_is_kept_to(tmp_path: Path) -> None:
    with stores(tmp_path, 2, bandwidth=SIZE * 1.0) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        began = time.monotonic()
        rank.save(1)
        rank.wait("replicated", step=1)
        assert time.monotonic() - began > 0.7


def test_close_is_prompt_with_peers_that_hang(tmp_path: Path) -> None:
    with stores(tmp_path, 2, patience=60.0) as [(a, _), (b, _)]:
        proxy = Proxy(b.port, SIZE // 2, cut=False)
        rank = FakeRank(a, 0)
        a.place({0: at_port(proxy.port)})
        rank.save(1)
        idle = socket.create_connection(("127.0.0.1", b.port))
        until(lambda: proxy.budget < 0, "it hangs")
        began = time.monotonic()
        a.close()
        b.close()
        assert time.monotonic() - began < 5
        idle.close()
        proxy.close()


def test_a_snapshot_withdrawn_while_its_replica_is_sent_is_answered(tmp_path: Path) -> None:
    """The next save() must not wait for it."""
    with stores(tmp_path, 2, patience=60.0) as [(a, _), (b, _)]:
        proxy = Proxy(b.port, SIZE // 2, cut=False)
        rank = FakeRank(a, 0)
        a.place({0: at_port(proxy.port)})
        rank.save(1)
        rank.wait("kept", step=1)
        until(lambda: proxy.budget < 0, "it is half sent")
        file = "own-0-1.safetensors"
        with (rank.directory / file).open("r+b") as snapshot:
            snapshot.write(bytes(8))
        rank.say(op="unusable", step=1, file=file, why="changed", torn=True)
        rank.wait("alone", step=1)
        assert rank.heard("replicated") == []
        proxy.close()
