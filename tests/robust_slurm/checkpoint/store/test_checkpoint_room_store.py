"""The fate of prepared memory in a store: fetched into, left to the ranks, given back."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from checkpoint_stores import FakeRank, stores
from room_files import PIECE, files, prepared, use_small_pieces
from waiting import until

from robust_slurm.auto.headroom import headroom
from robust_slurm.checkpoint.store import reserve
from robust_slurm.checkpoint.store.events import Restore, WantedSnapshot
from robust_slurm.checkpoint.store.store import Store
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.snapshot_store import SnapshotStore
from srun_wrapper.protocol.checkpoint_messages import MakeRoom
from srun_wrapper.protocol.messages import Start
from srun_wrapper.protocol.task_options import TaskOptions


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_pieces(monkeypatch)


def _fetch(store: Store, source: Store, owner: int, step: int) -> str:
    (outcome,) = store.fetch([WantedSnapshot(owner, step, "127.0.0.1", source.port)])
    assert outcome.ok, outcome.why
    return outcome.file


def test_a_fetch_uses_the_room_and_the_ranks_get_what_is_left(tmp_path: Path) -> None:
    with stores(tmp_path, 2) as [(a, _), (spare, _)]:
        rank = FakeRank(a, 0)
        data = rank.save(1)
        rank.wait("kept", step=1)
        prepared(spare.room, len(data) + PIECE, 2)
        directory = spare.socket_path.parent
        inodes = {path.stat().st_ino for path in files(directory)}
        assert spare.stock() == []
        file = _fetch(spare, a, 0, 1)
        assert (directory / file).read_bytes() == data
        assert (directory / file).stat().st_ino in inodes
        assert len(files(directory)) == 1
        assert [(h.tier, h.owner, h.step, h.ok) for h in spare.stock()] == [("memory", 0, 1, True)]
        spare.begin(1, Restore(1, "memory", {0: file}))
        assert files(directory) == []
        assert (directory / file).read_bytes() == data


def test_a_fetch_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with stores(tmp_path, 2, patience=0.3) as [(a, _), (spare, _)]:
        prepared(spare.room, PIECE, 1)
        (outcome,) = spare.fetch([WantedSnapshot(0, 1, "127.0.0.1", a.port)])
        assert not outcome.ok
        assert spare.stock() == []
        assert spare.room.sizes == [PIECE]


def test_a_store_that_ends_gives_its_room_back_and_no_other_stores(tmp_path: Path) -> None:
    kept: list[object] = []
    one = Store(tmp_path / "ckpt", name="0", key=b"k" * 32, emit=kept.append)
    other = Store(tmp_path / "ckpt", name="1", key=b"k" * 32, emit=kept.append)
    prepared(one.room, PIECE, 2)
    prepared(other.room, PIECE, 1)
    one.close()
    assert len(files(tmp_path / "ckpt")) == 1
    one.room.prepare(PIECE, 1)  # an order that came late
    other.begin(1, None)
    assert files(tmp_path / "ckpt") == []
    other.close()
    assert not (tmp_path / "ckpt").exists()


def test_the_supervisors_order_makes_room_in_every_slot_until_the_ranks_come(
    tmp_path: Path,
) -> None:
    loop = Loop()
    stores = [
        SnapshotStore(loop, local, tmp_path, b"k" * 32, lambda _message: None, TaskOptions())
        for local in (0, 1)
    ]
    directory = tmp_path / "ckpt"
    try:
        for store in stores:
            store.handle(MakeRoom(PIECE, 2))
        until(lambda: [p.stat().st_size for p in files(directory)] == [PIECE] * 4, "the room")
        for store in stores:
            store.begin(Start(1, {}, (), 0.0, 0, True, 1, "n0", 7000))
        assert files(directory) == []
    finally:
        for store in stores:
            store.close()


def test_room_of_a_store_that_was_killed_is_no_snapshot(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    left = directory / ".room-0-0.safetensors"
    left.write_bytes(bytes(3 * PIECE))
    store = Store(directory, name="0", key=b"k" * 32, emit=lambda _event: None)
    FakeRank(store, 0).wait("welcome")
    assert store.stock() == []
    prepared(store.room, PIECE, 1)
    store.close()
    assert not directory.exists()


def test_the_cache_of_files_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache's pages count as used in a cgroup, but the kernel gives them back."""
    for root, name, text in (
        ("proc", "meminfo", "MemAvailable: 1000 kB\n"),
        ("proc", "self/cgroup", "0::/job\n"),
        ("cgroup", "job/memory.max", "900000"),
        ("cgroup", "job/memory.current", "880000"),
        ("cgroup", "job/memory.stat", "inactive_file 500000\nactive_file 200000\n"),
    ):
        path = tmp_path / root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = partial(headroom, str(tmp_path / "proc"), str(tmp_path / "cgroup"))
    monkeypatch.setattr(reserve, "headroom", found)
    assert reserve.free(str(tmp_path)) == 720_000
