"""Less memory than all snapshots would take: fewer are kept, each loss said with its numbers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from checkpoint_stores import FakeRank, replicas, stores, target
from checkpointed_training import Training, fake_store
from waiting import until

from robust_slurm.checkpoint.copying.form import Form
from robust_slurm.checkpoint.copying.slots import Ring, Slot
from robust_slurm.checkpoint.format.layout import Entry, Snapshot
from robust_slurm.checkpoint.training.room import ALONE, LADDER, RoomRung, choose

GB = 10**9


@pytest.mark.parametrize(
    ("room", "rung", "says"),
    [
        (56 * GB, RoomRung(3, 1, 3), ""),
        (55 * GB, RoomRung(2, 0, 2), "take 56 GB of /dev/shm (a tmpfs), 55 GB are free. Kept: 2"),
        (32 * GB, RoomRung(2, 0, 2), "Kept: 2 own and 2 replicas: each step waits until all ranks"),
        (31 * GB, RoomRung(2, 0, 0), "Kept: 2 own and 0 replicas: no node keeps replicas here"),
        (8 * GB, RoomRung(1, 0, 0), "not every step is saved"),
        (7 * GB, None, "7.0 GB are free"),
    ],
)
def test_the_first_rung_that_fits(room: int, rung: RoomRung | None, says: str) -> None:
    """Two ranks of 4 GB each."""
    found, text = choose(room, 4 * GB, 2, LADDER)
    assert found == rung and says in text and bool(text) == bool(says)


@pytest.mark.parametrize(
    ("below", "rung"),
    [
        (RoomRung(3, 1, 3), RoomRung(2, 0, 2)),
        (RoomRung(2, 0, 2), RoomRung(2, 0, 0)),
        (RoomRung(1, 0, 0), None),
    ],
)
def test_a_rung_that_had_no_room_after_all_is_not_chosen_again(
    below: RoomRung, rung: RoomRung | None
) -> None:
    found, text = choose(99 * GB, 4 * GB, 2, LADDER, below)
    assert found == rung and "99 GB are free" in text


def test_outside_robust_srun_only_what_goes_to_disk_is_kept() -> None:
    assert choose(8 * GB, 4 * GB, 1, ALONE) == (RoomRung(1, 1, 0), "")
    assert choose(7 * GB, 4 * GB, 1, ALONE)[0] == RoomRung(1, 0, 0)


FORM = Form(
    [Entry("t", "U8", (100,), "t", (100,), (0,), "private")],
    (0,),
    Snapshot(0, 0, 1, 0, "job7", {}, (0,), None, ()),
)


def fill(slot: Slot | None, step: int) -> int:
    """Fill a slot; return its index, once it is complete."""
    assert slot is not None
    slot.fit(FORM)
    slot.complete(FORM.header(step, "{}"), step)
    slot.step = step
    return slot.index


def test_of_two_slots_the_newest_that_all_ranks_have_is_left_alone(tmp_path: Path) -> None:
    ring = Ring(tmp_path, 0, {}, own=2, extra=0)
    assert [fill(ring.take(()), 1), fill(ring.take((), 1), 2)] == [0, 1]
    assert fill(ring.take((), 2), 3) == 0  # all have 2
    assert fill(ring.take((), 2), 4) == 0  # 3 was not heard of in time: 2 stays
    assert ring.take({0}, 2) is None  # 4 is being sent
    assert ring.take({1}, 4) is None  # 2 is being written to disk
    assert fill(ring.take((), 4), 5) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_slot_more_is_used_only_while_one_is_held(tmp_path: Path) -> None:
    ring = Ring(tmp_path, 0, {}, own=2, extra=1)
    fill(ring.take(()), 1)
    fill(ring.take((), 1), 2)
    assert fill(ring.take((), 2), 3) == 0
    assert fill(ring.take({1}, 3), 4) == 2  # 2 is being written to disk, all have 3


def test_fewer_slots_than_before_give_their_files_back(tmp_path: Path) -> None:
    ring = Ring(tmp_path, 0, {})
    for step in range(1, 4):
        fill(ring.take(()), step)
    ring.limit(2, 0)
    assert fill(ring.take((), 2), 4) == 0  # not slot 1, which all have
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_slot_beyond_the_limit_is_not_filled(tmp_path: Path) -> None:
    """The slot's file found no room."""
    fill(Slot(tmp_path / "own-0-1.safetensors", 1), 5)
    ring = Ring(tmp_path, 0, {1: 5})
    ring.limit(1, 0)
    assert fill(ring.take((), 5), 6) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_of_two_replicas_the_newest_that_all_ranks_have_is_left_alone(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank, other = FakeRank(a, 0), FakeRank(b, 1)
        a.place({0: target(b)})
        other.wait("welcome")
        other.say(op="slots", replicas=2)
        until(lambda: b._peers._slots == 2, "the limit")
        for step in (1, 2):
            rank.save(step)
            rank.wait("replicated", step=step)
        rank.save(3)
        rank.wait("kept", step=3)
        assert replicas(b) == [(0, 1), (0, 2)]  # it waits until all have 2
        threading.Thread(target=b.complete, args=(2, 2)).start()
        rank.wait("replicated", step=3)
        assert replicas(b) == [(0, 2), (0, 3)]
        assert other.wait("complete", step=2, passed=2)


def test_a_node_with_room_for_its_own_only_takes_no_replicas(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, events), (b, _)]:
        rank, other = FakeRank(a, 0), FakeRank(b, 1)
        a.place({0: target(b)})
        other.say(op="slots", replicas=0)
        until(lambda: b._peers._slots == 0, "the limit")
        rank.save(1)
        rank.wait("alone", step=1)
        assert "has room for the snapshots of its own ranks only" in str(events)
        assert replicas(b) == []


def test_the_first_snapshot_takes_the_room_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One snapshot's room is enough where values make its header long, too."""
    made: list[str] = []
    make = Slot._open

    def counted(slot: Slot, size: int) -> None:
        made.append(slot.path.name)
        make(slot, size)

    monkeypatch.setattr(Slot, "_open", counted)
    with fake_store(tmp_path / "s", monkeypatch) as store:
        training = Training(extra={"note": "x" * 200_000})
        training.ckpt.resume()
        training.ckpt.extra["note"] = "x" * 200_000
        training.ckpt.save(1)
        store.wait("saved", 1)
        assert made.count("own-0-0.safetensors") == 1
        training.ckpt.close()


def test_a_step_that_is_left_out_is_told_so_that_no_other_rank_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_store(tmp_path / "s", monkeypatch) as store:
        training = Training()
        assert training.ckpt.resume() == 0
        session = training.ckpt._session
        assert session is not None and session.saver is not None and session.client is not None
        session.saver.room.keep(RoomRung(2, 0, 2))
        client = session.client
        for step in (1, 2):
            training.step(step)
            store.wait("saved", step)
            store.tell("complete", step=step, passed=step)
            until(lambda step=step: client._passed == step, "passed")  # type: ignore[misc]
        store.tell("held", slots=[0, 1])
        until(lambda: client.held() >= {0, 1}, "held")
        training.step(3)
        assert [m["step"] for m in store.wait("skipped")] == [3]
        training.ckpt.close()


def test_a_replica_beyond_the_limit_gives_its_memory_back_at_once(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (b, _)]:
        rank = FakeRank(a, 0)
        a.place({0: target(b)})
        for step in range(1, 4):
            rank.save(step)
            rank.wait("replicated", step=step)

        def mapped() -> int:
            maps = Path("/proc/self/maps").read_text()
            return sum(str(tmp_path / "s1" / "replica-0-") in line for line in maps.splitlines())

        assert mapped() == 3
        b._peers.limit(1)  # the last one may be coming in still: its end frees the rest
        until(lambda: mapped() == 1, "the memory of the others")
