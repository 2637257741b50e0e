"""One store and its ranks: what is kept, what survives an epoch, what is found wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_stores import SIZE, Events, FakeRank, stores, write_snapshot
from waiting import until

from robust_slurm.checkpoint.planning.interval import Cost
from robust_slurm.checkpoint.store.events import (
    AlarmEvent,
    EnrolledEvent,
    Holding,
    Restore,
    ResumedEvent,
    SavedEvent,
)
from robust_slurm.checkpoint.store.store import Store


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Store, Events]]:
    with stores(tmp_path, 1, key=None) as made:
        yield made[0]


def _saved(rank: FakeRank, *steps: int) -> None:
    for step in steps:
        rank.save(step)
        rank.wait("kept", step=step)
        rank.wait("alone", step=step)


def _steps(store: Store, *, ok: bool = True) -> list[tuple[int, int]]:
    return sorted((h.owner, h.step) for h in store.stock() if h.ok is ok)


def test_enrolling_is_answered_and_reported(alone: tuple[Store, Events]) -> None:
    store, events = alone
    rank = FakeRank(
        store,
        2,
        mesh={"dp": 2, "pp": 2},
        needs=[0],
        directory="/ckpt",
        every=10,
        bytes=5,
        stages=2,
    )
    welcome = rank.wait("welcome")
    assert welcome == {
        "op": "welcome", "restore": None, "own": [], "directory": str(store.socket_path.parent),
        "every": 1, "first": 0, "stand": -1, "line": 0,
    }  # fmt: skip
    assert events.wait(EnrolledEvent) == EnrolledEvent(
        0, 2, 4, {"dp": 2, "pp": 2}, (0, 2), "/ckpt", 10, 5, stages=2
    )  # fmt: skip
    assert store.socket_path.stat().st_mode & 0o777 == 0o600
    assert store.socket_path.parent.stat().st_mode & 0o777 == 0o700
    assert store.port == 0


def test_a_snapshot_is_kept_and_is_in_the_stock(alone: tuple[Store, Events]) -> None:
    store, events = alone
    rank = FakeRank(store, 1)
    rank.save(5)
    assert rank.wait("kept") == {"op": "kept", "step": 5, "held": []}
    rank.wait("alone", step=5)
    (held,) = store.stock()
    assert held._replace(size=0) == Holding(
        1, 5, 4, (1,), "memory", "own-1-2.safetensors", 0, True, ""
    )
    assert held.size == (store.socket_path.parent / held.file).stat().st_size > SIZE
    cost = Cost(0.0, 0.01, 0.0, 0.0)
    assert events.wait(SavedEvent)._replace(safe=-1, have=()) == SavedEvent(
        0, 1, 5, None, held.size, 0.1, 0.01, cost=cost
    )
    assert store.stock(step=4) == []
    assert store.stock(step=5) == [held]


def test_a_rank_reports_the_steps_that_it_has_again_as_a_report_may_be_lost(
    alone: tuple[Store, Events],
) -> None:
    store, events = alone
    rank = FakeRank(store, 0)
    for step in range(1, 5):
        rank.save(step)
        rank.wait("alone", step=step)
        events.wait(SavedEvent, lambda e, step=step: e.safe == step)  # type: ignore[misc]
    assert events.of(SavedEvent)[-1].have == (2, 3, 4)  # 1 was overwritten


def test_saved_is_reported_at_most_twice_a_second_and_the_newest_in_the_end(
    alone: tuple[Store, Events],
) -> None:
    store, events = alone
    _saved(FakeRank(store, 0), *range(1, 20))
    events.wait(SavedEvent, lambda e: e.step == 19)
    assert len(events.of(SavedEvent)) <= 10


def test_snapshots_outlive_their_rank(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    rank = FakeRank(store, 0)
    _saved(rank, 1, 2, 3)
    rank.die()
    assert _steps(store) == [(0, 1), (0, 2), (0, 3)]
    again = FakeRank(store, 0)
    assert sorted(s["step"] for s in again.wait("welcome")["own"]) == [1, 2, 3]


def test_a_rank_that_dies_in_the_middle_of_a_copy_leaves_a_torn_slot(
    alone: tuple[Store, Events],
) -> None:
    store, _ = alone
    rank = FakeRank(store, 0)
    _saved(rank, 1, 2, 3)
    path = store.socket_path.parent / "own-0-1.safetensors"
    with path.open("r+b") as file:  # step 4 has begun
        file.write(bytes(8))
    rank.die()
    found = {h.file: h for h in store.stock()}
    assert not found[path.name].ok
    assert "torn" in found[path.name].why
    assert _steps(store) == [(0, 2), (0, 3)]
    again = FakeRank(store, 0)
    assert sorted(s["slot"] for s in again.wait("welcome")["own"]) == [0, 2]


def test_a_complete_snapshot_whose_message_did_not_come_counts(
    alone: tuple[Store, Events],
) -> None:
    store, _ = alone
    rank = FakeRank(store, 0)
    _saved(rank, 1, 2, 3)
    write_snapshot(store.socket_path.parent / "own-0-1.safetensors", 0, 4)
    rank.die()
    assert _steps(store) == [(0, 2), (0, 3), (0, 4)]


def test_of_another_epoch_it_does_not(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    FakeRank(store, 0).wait("welcome")
    write_snapshot(store.socket_path.parent / "own-0-1.safetensors", 0, 4, epoch=1)
    assert store.stock() == []


@pytest.mark.parametrize("at", [5000, 100_000, SIZE + 4000])
def test_a_flipped_bit_is_found_and_named(alone: tuple[Store, Events], at: int) -> None:
    store, _ = alone
    _saved(FakeRank(store, 0), 1, 2)
    with (store.socket_path.parent / "own-0-2.safetensors").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x20]))
    (bad,) = [h for h in store.stock() if not h.ok]
    assert (bad.step, bad.file) == (2, "own-0-2.safetensors")
    assert "chunk 0" in bad.why and "differs from its digest" in bad.why
    assert _steps(store) == [(0, 1)]


def test_a_flipped_bit_in_the_header_is_found_too(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    _saved(FakeRank(store, 0), 1)
    with (store.socket_path.parent / "own-0-1.safetensors").open("r+b") as file:
        file.seek(60)
        file.write(b"\xff")
    assert _steps(store, ok=False) == [(0, 1)]


@pytest.mark.parametrize("size", [5000, SIZE * 2])
def test_a_file_whose_size_was_changed_is_in_the_stock_as_bad(
    alone: tuple[Store, Events], size: int
) -> None:
    store, _ = alone
    rank = FakeRank(store, 3)
    rank.save(1)
    rank.wait("kept", step=1)
    rank.save(2)
    rank.wait("kept", step=2)
    os.truncate(store.socket_path.parent / "own-3-1.safetensors", size)
    for _ in range(2):
        bad, good = sorted(store.stock(), key=lambda h: h.step)
        assert good.ok
        assert (bad.owner, bad.step, bad.ok) == (3, 1, False)
        assert f"its size is {size} bytes" in bad.why
    rank.save(4)  # into the same slot
    rank.wait("kept", step=4)
    assert sorted((h.step, h.ok) for h in store.stock()) == [(2, True), (4, True)]


def test_a_file_that_is_gone_or_replaced_is_not_in_the_stock(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    rank = FakeRank(store, 0)
    _saved(rank, 1, 2)
    rank.die()
    directory = store.socket_path.parent
    (directory / "own-0-1.safetensors").unlink()
    (directory / "new").write_bytes((directory / "own-0-2.safetensors").read_bytes())
    (directory / "new").rename(directory / "own-0-2.safetensors")
    until(lambda: store.stock(step=1) == [], "the missing one forgotten")
    assert _steps(store) == [(0, 2)]  # complete and of this epoch: adopted as it is


@pytest.mark.parametrize(
    ("restore", "left"),
    [
        (None, []),
        (Restore(2, "shared", {}), []),
        (Restore(2, "memory", {0: "own-0-2.safetensors"}), [(0, 1), (0, 2)]),
        (Restore(3, "memory", {0: "own-0-0.safetensors"}), [(0, 1), (0, 2), (0, 3)]),
    ],
)
def test_a_new_epoch_drops_what_is_newer_than_its_start(
    alone: tuple[Store, Events], restore: Restore | None, left: list[tuple[int, int]]
) -> None:
    store, _ = alone
    rank = FakeRank(store, 0)
    _saved(rank, 1, 2, 3)
    store.begin(1, restore)
    assert rank.ended.wait(10)
    assert _steps(store) == left
    files = {p.name for p in store.socket_path.parent.glob("*.safetensors")}
    assert len(files) == len(left)
    again = FakeRank(store, 0, epoch=1)
    plan = again.wait("welcome")["restore"]
    if restore is None:
        assert plan is None
    else:
        shards = {str(k): v for k, v in restore.shards.items()}
        assert plan == {"step": restore.step, "tier": restore.tier, "shards": shards}


def test_a_rank_of_another_epoch_is_refused(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    store.begin(3, None)
    for epoch in (2, 4):
        rank = FakeRank(store, 0, epoch=epoch)
        assert "here it is 3" in rank.wait("refused")["why"]
        assert rank.ended.wait(10)
    FakeRank(store, 0, epoch=3).wait("welcome")


def test_a_rank_that_has_gone_on_is_not_sent_back_to_the_start_of_the_epoch(
    alone: tuple[Store, Events],
) -> None:
    store, _ = alone
    rank = FakeRank(store, 0)
    _saved(rank, 1, 2)
    store.begin(1, Restore(2, "memory", {0: "own-0-2.safetensors"}))
    rank = FakeRank(store, 0, epoch=1)
    _saved(rank, 3)
    assert FakeRank(store, 0, epoch=1).wait("welcome")["restore"] is None


def test_a_second_connection_of_a_rank_ends_the_first(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    first, other = FakeRank(store, 0), FakeRank(store, 1)
    first.wait("welcome")
    second = FakeRank(store, 0)
    assert first.ended.wait(10)
    _saved(second, 1)
    _saved(other, 1)
    assert _steps(store) == [(0, 1), (1, 1)]


def test_resumed_and_alarms_are_passed_on(alone: tuple[Store, Events]) -> None:
    store, events = alone
    rank = FakeRank(store, 3)
    rank.say(op="resumed", step=12)
    rank.say(op="alarm", text="no room")
    assert events.wait(ResumedEvent) == ResumedEvent(0, 3, 12)
    assert events.wait(AlarmEvent) == AlarmEvent(3, "no room")


def test_an_unusable_file_counts_as_bad(alone: tuple[Store, Events]) -> None:
    store, events = alone
    rank = FakeRank(store, 0)
    _saved(rank, 1, 2)
    rank.say(op="unusable", step=2, file="own-0-2.safetensors", why="dtype")
    assert "dtype" in events.wait(AlarmEvent).text
    assert _steps(store) == [(0, 1)]
    (bad,) = [h for h in store.stock() if not h.ok]
    assert "rank 0 could not use it: dtype" in bad.why


def test_what_is_too_old_goes(alone: tuple[Store, Events]) -> None:
    store, _ = alone
    gone = FakeRank(store, 1)
    _saved(gone, 1)
    gone.die()
    rank = FakeRank(store, 0)
    _saved(rank, 1, 2, 3, 4)
    assert (1, 1) in _steps(store)  # still of use
    _saved(rank, 5)
    until(lambda: (1, 1) not in _steps(store), "the file of the rank that left is removed")
    assert not (store.socket_path.parent / "own-1-1.safetensors").exists()


def test_close_removes_the_files_and_is_quick(tmp_path: Path) -> None:
    with stores(tmp_path, 1, key=None) as [(store, _)]:
        rank = FakeRank(store, 0)
        _saved(rank, 1, 2)
        (store.socket_path.parent / "own-0-0.safetensors").write_bytes(bytes(100))  # half written
        store.close()
        assert rank.ended.wait(10)
        assert not store.socket_path.parent.exists()


def test_several_stores_share_a_directory(tmp_path: Path) -> None:
    one = Store(tmp_path / "d", name="0", key=None, emit=Events().append)
    two = Store(tmp_path / "d", name="1", key=None, emit=Events().append)
    _saved(FakeRank(one, 0), 1)
    _saved(FakeRank(two, 1), 1)
    assert _steps(one) == [(0, 1)]
    one.close()
    assert _steps(two) == [(1, 1)]
    two.close()
    assert not (tmp_path / "d").exists()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Store(tmp_path / "a" / "b", name="0", key=None, emit=Events().append)
    with pytest.raises(OSError):
        Store(tmp_path / ("x" * 120), name="0", key=None, emit=Events().append)


def test_importing_the_store_loads_nothing_heavy() -> None:
    code = (
        "import sys; import robust_slurm.checkpoint.store.store; "
        "print([m for m in ('torch', 'asyncio', 'dataclasses', 'concurrent.futures', 'logging', "
        "'inspect', 'numpy', 'pickle') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    def use(name: str) -> None:
        with stores(tmp_path / name, 1, key=None) as [(store, _)]:
            rank = FakeRank(store, 0)
            _saved(rank, 1, 2)
            store.stock()
            rank.die()

    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    use("a")
    before = _descriptors()
    use("b")
    use("c")
    until(lambda: _descriptors() <= before, "as many descriptors as before")


def test_what_a_store_reports_is_of_the_epoch_in_which_it_came(tmp_path: Path) -> None:
    with stores(tmp_path, 1, key=None) as [(store, events)]:
        FakeRank(store, 0).save(7)
        assert events.wait(SavedEvent).epoch == 0
        store.begin(3, None)
        rank = FakeRank(store, 0, epoch=3)
        rank.say(op="resumed", step=5)
        rank.save(6)
        assert events.wait(ResumedEvent) == ResumedEvent(3, 0, 5)
        assert events.wait(SavedEvent, lambda e: e.step == 6).epoch == 3


def test_a_step_that_is_left_out_is_passed_once_the_one_before_is_answered(
    tmp_path: Path,
) -> None:
    with stores(tmp_path, 1) as [(store, events)]:
        rank = FakeRank(store, 0)
        rank.save(1)
        rank.wait("alone", step=1)
        rank.say(op="skipped", step=2)
        assert events.wait(SavedEvent, lambda e: e.safe == 2).have == (1,)
        rank.save(3)
        rank.wait("alone", step=3)
        assert events.wait(SavedEvent, lambda e: e.safe == 3).have == (1, 3)
