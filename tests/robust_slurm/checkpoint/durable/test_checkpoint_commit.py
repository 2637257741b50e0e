"""Committing a step: it waits for all parts, refuses what does not fit, and replaces."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from durable_snapshots import (
    data_parallel,
    save_snapshot,
    save_world,
)
from durable_tiers import RUN, commit_now, listed, save, tiny

from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.commit import CommitRequest, CommitResult, commit
from robust_slurm.checkpoint.durable.dcp.write import write
from robust_slurm.checkpoint.durable.files import DurableError, digest_inside, read_inside
from robust_slurm.checkpoint.durable.verify import verify


def test_commit_waits_for_all_ranks(tmp_path: Path, tier: Path) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5, 0, 2)), tier, RUN)
    with pytest.raises(DurableError, match=r"no part of rank 1 in .*older checkpoints stay"):
        commit_now(tier, 5, 2, wait=0.3)
    outcome: list[CommitResult] = []
    waiting = threading.Thread(target=lambda: outcome.append(commit_now(tier, 5, 2, wait=60)))
    waiting.start()
    write(str(tiny(tmp_path / "b.safetensors", 5, 1, 2)), tier, RUN)
    waiting.join(60)
    assert outcome
    assert listed(tier) == [5]


def test_the_same_commit_twice_at_once(tmp_path: Path, tier: Path) -> None:
    """A flush may ask for the step whose commit is under way: both succeed."""
    for step in range(1, 9):
        write(str(tiny(tmp_path / "own.safetensors", step)), tier, RUN)
        with ThreadPoolExecutor(4) as pool:
            done = list(pool.map(lambda _, step=step: commit_now(tier, step).step, range(4)))
        assert done == [step] * 4
        assert listed(tier)[-1] == step


def test_a_step_that_newer_commits_removed(tmp_path: Path, tier: Path) -> None:
    """The step's own commit still waits for a part."""
    write(str(tiny(tmp_path / "a.safetensors", 5, 0, 2)), tier, RUN)
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(DurableError) as failed:
            commit_now(tier, 5, 2, wait=60)
        said.append(str(failed.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    save(tier, 6)
    assert not durable.step_dir(tier, 5).exists()
    waiting.join(60)
    assert said == ["a newer step is on disk"]


def test_a_waiting_commit_opens_only_what_has_come(
    tmp_path: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5, 1, 3)), tier, RUN)
    opened: list[str] = []

    def spy(where: Path, name: str, limit: int) -> bytes:
        opened.append(name)
        return read_inside(where, name, limit)

    monkeypatch.setattr("robust_slurm.checkpoint.durable.commit.read_inside", spy)
    with pytest.raises(DurableError, match="no part of rank 0, 2 in"):
        commit_now(tier, 5, 3, wait=0.5)
    assert opened == [f"{RUN}-rank-1.json"]


def test_commit_is_given_up_when_asked(tier: Path) -> None:
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(DurableError, match="given up"):
        commit(CommitRequest(tier, 5, 2, RUN, 1000, 2), stop)


def test_commit_refuses_parts_of_another_shape(tmp_path: Path, tier: Path) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5, 0, 2)), tier, RUN)
    with pytest.raises(DurableError, match=r"rank 0 of 2, not of .* rank 0 of 1"):
        commit_now(tier, 5, 1)
    assert listed(tier) == []


def test_commit_refuses_a_tensor_with_a_hole(
    tmp_path: Path, tier: Path, trained_state: Any
) -> None:
    sources = save_world(tmp_path, trained_state, 2, data_parallel)
    write(str(sources[0]), tier, RUN)
    save_snapshot(sources[1], [], {}, step=100, rank=1, world=2)
    write(str(sources[1]), tier, RUN)
    with pytest.raises(DurableError, match="not complete"):
        commit_now(tier, 100, 2)
    assert listed(tier) == []


def test_commit_notices_a_data_file_cut_short(tmp_path: Path, tier: Path) -> None:
    write(str(tiny(tmp_path / "a.safetensors", 5)), tier, RUN)
    data = durable.step_dir(tier, 5) / f"{RUN}-0_0.distcp"
    os.truncate(data, 10)
    with pytest.raises(DurableError, match="has 10 bytes"):
        commit_now(tier, 5)


def test_retention_at_commit(tier: Path) -> None:
    for step in (10, 20, 30):
        save(tier, step)
    assert listed(tier) == [20, 30]


def test_a_step_under_way_before_a_damaged_one_stays(tmp_path: Path, tier: Path) -> None:
    """Training resumed from step 8, as 98 and 99 are damaged; the next steps are older than they.

    A commit removed what ranks had written of the step after it.
    """
    for step in (4, 8, 98, 99):
        save(tier, step)
    for step in (12, 16, 20):
        write(str(tiny(tmp_path / "a.safetensors", step + 4, 0, 2)), tier, RUN)
        write(str(tiny(tmp_path / "own.safetensors", step + 1)), tier, RUN)
        commit_now(tier, step + 1)
        write(str(tiny(tmp_path / "b.safetensors", step + 4, 1, 2)), tier, RUN)
        commit_now(tier, step + 4, 2)
        assert listed(tier)[-3:] == [step + 4, 98, 99]
    assert listed(tier) == [21, 24, 98, 99]  # as many of this training as are kept
    save(tier, 100)
    save(tier, 101)
    assert listed(tier) == [100, 101]


def test_data_stay_with_a_manifest_that_cannot_be_removed(
    tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its data a step would look committed that cannot be loaded."""
    save(tier, 10)
    save(tier, 20)
    unlink = Path.unlink

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.name == durable.MANIFEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", failing)
    save(tier, 30)
    assert listed(tier) == [10, 20, 30]
    assert verify(durable.step_dir(tier, 10)) == []
    monkeypatch.undo()
    save(tier, 40)
    assert listed(tier) == [30, 40]


def test_another_attempt_replaces_a_committed_step(tier: Path) -> None:
    save(tier, 5, "77.e0", fill=1.0)
    save(tier, 5, "77.e1", fill=2.0)
    assert listed(tier) == [5]
    assert durable.read_manifest(durable.step_dir(tier, 5)).attempt == "77.e1"
    with pytest.raises(DurableError, match="came later"):
        save(tier, 5, "77.e0", fill=1.0)
    save(tier, 5, "99.e0", fill=3.0)  # another job
    assert listed(tier) == [5]


def test_a_commit_of_a_timeline_that_is_over_replaces_no_later_one(tier: Path) -> None:
    order = ["77.e0", "77.e0-5", "77.e0-17", "77.e1", "77.e1-3"]
    for older, newer in pairwise(order):
        save(tier, 5, older)
        save(tier, 5, newer)
        with pytest.raises(DurableError, match=f"not committed for {older}: {newer}, which"):
            save(tier, 5, older)
        assert durable.read_manifest(durable.step_dir(tier, 5)).attempt == newer


def test_two_attempts_at_once_leave_one_good_step(tmp_path: Path, tier: Path) -> None:
    attempts = ["a.e0", "b.e0", "c.e0"]
    for number, attempt in enumerate(attempts):
        source = tiny(tmp_path / f"{attempt}.safetensors", 5, fill=float(number))
        write(str(source), tier, attempt)
    failed: list[Exception] = []

    def again_and_again(attempt: str) -> None:
        try:
            for _ in range(8):
                commit_now(tier, 5, attempt=attempt)
        except Exception as err:  # noqa: BLE001 - reported below
            failed.append(err)

    threads = [threading.Thread(target=again_and_again, args=(a,)) for a in attempts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if durable.committed(tier):
            assert verify(durable.step_dir(tier, 5)) == []
    for thread in threads:
        thread.join()
    assert not failed
    assert listed(tier) == [5]
    where = durable.step_dir(tier, 5)
    assert digest_inside(where, ".metadata") == durable.read_manifest(where).metadata


def test_two_runs_that_share_a_directory_are_told(tmp_path: Path, tier: Path) -> None:
    """A run that goes on from another's checkpoints is not told, nor is a next incarnation."""

    def notes(step: int, attempt: str) -> list[str]:
        write(str(tiny(tmp_path / "own.safetensors", step)), tier, attempt)
        return commit_now(tier, step, attempt=attempt, keep=9).notes

    save(tier, 5, "76.e0")
    assert notes(6, "77.e0") == []
    assert notes(7, "77.e1") == []
    where = durable.step_dir(tier, 8)  # as the other run's writer process on another node does
    shutil.copytree(durable.step_dir(tier, 5), where)
    manifest = where / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step":5', '"step":8'))
    (said,) = notes(9, "77.e1")
    assert "another run (76) commits" in said and "Give each run its own directory" in said, said
    assert notes(10, "77.e1") == []
