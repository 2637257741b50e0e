"""The store's way to the node's own disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from checkpoint_stores import SIZE, FakeRank, stores
from waiting import until

from robust_slurm.checkpoint.store.disk import archive
from robust_slurm.checkpoint.store.disk.local import LocalDisk
from robust_slurm.checkpoint.store.events import (
    AlarmEvent,
    CommittedEvent,
    PersistedEvent,
    Restore,
    WantedSnapshot,
)
from robust_slurm.checkpoint.store.shelf import ShelfRecord


@pytest.fixture(autouse=True)
def _fake_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        archive,
        "writer_command",
        lambda python: [python, "-m", "tests.support.checkpoint.fake_checkpoint_writer"],
    )


def test_the_local_disk_outlives_the_store(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with stores(tmp_path, 1, local_directory=str(disk), job="j1") as [(a, events)]:
        rank = FakeRank(a, 0)
        for step in (1, 2, 3):
            data = rank.save(step, persist=True)
            rank.wait("kept", step=step)
            until(lambda s=step: (disk / f"j1/own-0-{s}.json").exists(), "written")
        until(lambda: not (disk / "j1/own-0-1.safetensors").exists(), "only two are kept")
        # So that the next is asked for.
        assert events.wait(PersistedEvent, lambda e: e.step == 3).ok
        assert events.of(CommittedEvent) == []
    with stores(tmp_path, 1, local_directory=str(disk), job="j1") as [(b, _)]:
        found = [(h.tier, h.owner, h.step, h.world, h.needs, h.ok) for h in b.stock()]
        assert found == [("local", 0, 2, 4, (0,), True), ("local", 0, 3, 4, (0,), True)]
        (outcome,) = b.fetch([WantedSnapshot(0, 3, "", 0)])
        assert outcome.ok
        assert (b.socket_path.parent / outcome.file).read_bytes() == data
        b.begin(1, Restore(3, "memory", {0: outcome.file}))
        assert ("memory", 3, True) in [(h.tier, h.step, h.ok) for h in b.stock()]
    with stores(tmp_path, 1, local_directory=str(disk), job="j2") as [(c, _)]:
        assert c.stock() == []


def test_steps_that_training_gave_up_take_no_place(tmp_path: Path) -> None:
    """Training went back from step 9 to 3: the newest good step went before the next was stored."""
    disk, kept = LocalDisk(tmp_path, "j1"), []
    for step in (3, 8, 9, 4, 5):
        size = (tmp_path / "source").write_bytes(b"x" * 64)
        record = ShelfRecord(
            "own-0-0.safetensors", step=step, world=1, needs=(0,), epoch=0, size=size, inode=1,
            digest=[0],
        )  # fmt: skip
        with (tmp_path / "source").open("rb") as file:
            disk.store(file.fileno(), record)
        kept.append([each.step for each in disk.stock(0)])
    assert kept == [[3], [3, 8], [8, 9], [4], [4, 5]]


def test_a_snapshot_on_another_nodes_disk_can_be_fetched(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with stores(tmp_path, 1, local_directory=str(disk), job="j1") as [(a, _)]:
        rank = FakeRank(a, 0)
        rank.save(1, persist=True)
        until(lambda: (disk / "j1/own-0-1.json").exists(), "written")
    (tmp_path / "n").mkdir()
    with (
        stores(tmp_path, 1, local_directory=str(disk), job="j1") as [(b, _)],
        stores(tmp_path / "n", 1) as [(c, _)],
    ):
        (outcome,) = c.fetch([WantedSnapshot(0, 1, "127.0.0.1", b.port)])
        assert outcome.ok, outcome
        assert outcome.bytes > SIZE


@pytest.mark.parametrize("damage", ["flip", "short", "note", "missing"])
def test_damage_on_the_disk_is_found(tmp_path: Path, damage: str) -> None:
    disk = tmp_path / "disk"
    with stores(tmp_path, 1, local_directory=str(disk), job="j1") as [(a, _)]:
        rank = FakeRank(a, 0)
        rank.save(1, persist=True)
        until(lambda: (disk / "j1/own-0-1.json").exists(), "written")
        path = disk / "j1/own-0-1.safetensors"
        if damage == "flip":
            with path.open("r+b") as file:
                file.seek(SIZE // 2)
                byte = file.read(1)[0]
                file.seek(SIZE // 2)
                file.write(bytes([byte ^ 1]))
        elif damage == "short":
            os.truncate(path, 1000)
        elif damage == "missing":
            path.unlink()
        else:
            (disk / "j1/own-0-1.json").write_text('{"owner": 0}')
        (bad,) = [h for h in a.stock() if h.tier == "local"]
        assert not bad.ok and bad.why
        (outcome,) = a.fetch([WantedSnapshot(0, 1, "", 0)])
        assert not outcome.ok and outcome.why
        assert list(a.socket_path.parent.glob("*fetched*")) == []


def test_a_disk_that_cannot_be_written_is_said_once_and_the_durable_tier_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "disk").write_text("a file")
    with stores(tmp_path, 1, key=None, local_directory=str(tmp_path / "disk")) as [(a, events)]:
        rank = FakeRank(a, 1, directory=str(tmp_path / "ckpt" / "good"), python=sys.executable)
        rank.wait("welcome")
        for step in (1, 2):
            rank.save(step, persist=True)
            assert events.wait(PersistedEvent, lambda e, s=step: e.step == s).ok
        assert len(events.of(AlarmEvent)) == 1


@pytest.mark.parametrize("mode", [0o777, 0o700])
def test_what_another_user_has_put_there_is_not_written_to(tmp_path: Path, mode: int) -> None:
    """The directory of a job can be made before it by anybody, with links to the user's files."""
    disk, mine = tmp_path / "disk", tmp_path / "authorized_keys"
    (disk / "j1").mkdir(parents=True)
    (disk / "j1").chmod(mode)
    mine.write_text("a key")
    (disk / "j1/.own-0-1.json.tmp").symlink_to(mine)
    with stores(tmp_path, 1, local_directory=str(disk), job="j1") as [(a, events)]:
        rank = FakeRank(a, 0)
        rank.save(1, persist=True)
        rank.wait("kept", step=1)
        if mode == 0o777:
            assert "is not this user's alone" in events.wait(AlarmEvent).text
        else:
            until(lambda: (disk / "j1/own-0-1.json").exists(), "written")
    assert mine.read_text() == "a key"
