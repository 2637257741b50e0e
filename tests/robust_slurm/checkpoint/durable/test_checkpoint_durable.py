"""The durable tier's directory without torch: what is committed, verifying, retention."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from made_steps import a_step

from robust_slurm.checkpoint.cli import main
from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.files import DurableError, digest_of
from robust_slurm.checkpoint.durable.prune import prune
from robust_slurm.checkpoint.durable.verify import verify


def test_what_is_committed(tmp_path: Path) -> None:
    assert durable.committed(tmp_path / "absent") == []
    assert durable.newest(tmp_path / "absent") is None
    for step in (5, 123456789, 20):
        a_step(tmp_path, step)
    (tmp_path / "step-00000030").mkdir()  # not committed
    (a_step(tmp_path, 40) / "manifest.json").write_text("{")  # damaged
    (tmp_path / "step-50").mkdir()
    (tmp_path / "step-00000060").symlink_to("step-00000020")
    assert [c.step for c in durable.committed(tmp_path)] == [5, 20, 123456789]
    found = durable.newest(tmp_path)
    assert found is not None
    assert (found.step, found.world, found.bytes, found.attempt) == (123456789, 2, 2000, "7.e0")


def test_a_directory_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DurableError, match="a directory is needed"):
        durable.committed(tmp_path / "file")


def test_a_manifest_of_another_step_is_refused(tmp_path: Path) -> None:
    a_step(tmp_path, 5).rename(tmp_path / "step-00000006")
    with pytest.raises(DurableError, match="step 5"):
        durable.read_manifest(tmp_path / "step-00000006")


def test_a_step_may_be_moved_to_another_name(tmp_path: Path) -> None:
    where = a_step(tmp_path, 5).rename(tmp_path / "best")
    assert verify(where) == []


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [flip, cut, to_link, Path.unlink])
@pytest.mark.parametrize("name", ["7.e0-1_0.distcp", "7.e0-rank-1.json", ".metadata"])
def test_any_damage_is_found(tmp_path: Path, name: str, damage: Any) -> None:
    where = a_step(tmp_path, 5)
    damage(where / name)
    problems = verify(where)
    assert {problem.file for problem in problems} == {name}
    assert str(where) in problems[0].what


def test_metadata_of_a_commit_that_was_cut_off_is_no_damage(tmp_path: Path) -> None:
    where = a_step(tmp_path, 5)
    manifest = durable.read_manifest(where)
    (where / ".metadata").write_bytes(b"newer")
    assert verify(where)
    ahead = manifest._replace(attempt="7.e1", metadata=(5, digest_of(b"newer")))
    (where / "7.e1-commit.json").write_bytes(durable.encode_manifest(ahead))
    assert verify(where) == []


def test_verifying_what_is_not_committed(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(DurableError, match="never committed"):
        verify(tmp_path / "step-00000001")


def steps(directory: Path) -> list[int]:
    return [step for step, _ in durable.step_dirs(directory)]


def uncommitted(directory: Path, step: int) -> Path:
    where = a_step(directory, step)
    (where / "manifest.json").unlink()
    return where


def test_retention(tmp_path: Path) -> None:
    for step in (10, 20, 30, 50):
        a_step(tmp_path, step)
    for step in (15, 40, 60):
        uncommitted(tmp_path, step)
    assert prune(tmp_path, 2, 50) == [f"step-000000{n}" for n in (10, 15, 20, 40)]
    assert steps(tmp_path) == [30, 50, 60]
    assert all(verify(c.path) == [] for c in durable.committed(tmp_path))


@pytest.mark.parametrize("keep", [0, 1])
def test_the_newest_always_stays_and_so_does_the_one_just_committed(
    tmp_path: Path, keep: int
) -> None:
    """After a return to an older step its checkpoints are not the newest by number."""
    for step in (10, 20, 30):
        a_step(tmp_path, step)
    prune(tmp_path, keep, 10)
    assert steps(tmp_path) == [10, 30]


def test_nothing_goes_before_something_is_committed(tmp_path: Path) -> None:
    uncommitted(tmp_path, 10)
    uncommitted(tmp_path, 20)
    assert prune(tmp_path, 1, 20) == []
    assert steps(tmp_path) == [10, 20]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    a_step(tmp_path, 50)
    foreign = tmp_path / "step-00000010"
    foreign.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (foreign / name).write_text("dcp's own")
    mixed = uncommitted(tmp_path, 20)
    (mixed / "notes.txt").write_text("mine")
    linked = tmp_path / "elsewhere"
    linked.mkdir()
    (linked / "7.e0-0_0.distcp").write_text("")
    (tmp_path / "step-00000030").symlink_to("elsewhere")
    assert prune(tmp_path, 1, 50) == []
    assert sorted(p.name for p in foreign.iterdir()) == [".metadata", "__0_0.distcp"]
    assert [p.name for p in mixed.iterdir()] == ["notes.txt"]
    assert [p.name for p in linked.iterdir()] == ["7.e0-0_0.distcp"]


def test_removal_begins_with_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off at any point, a step that goes is no committed one that does not verify."""
    a_step(tmp_path, 10)
    a_step(tmp_path, 20)
    removed: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    prune(tmp_path, 1, 20)
    assert removed[0] == "manifest.json"
    assert len(removed) >= 5


def test_what_cannot_be_read_neither_counts_nor_goes(tmp_path: Path) -> None:
    """A newer version may have written it; two that are damaged must not cost two good ones."""
    for step in (1, 2, 3, 4, 5):
        a_step(tmp_path, step)
    for step, text in ((1, '{"version": 99}'), (4, ""), (5, "{")):
        (durable.step_dir(tmp_path, step) / "manifest.json").write_text(text)
    assert prune(tmp_path, 2, 3) == []
    found, unreadable = durable.list_steps(tmp_path)
    assert [each.step for each in found] == [2, 3]
    assert list(unreadable) == [1, 4, 5]
    assert "version 99" in unreadable[1]
    a_step(tmp_path, 6)
    assert prune(tmp_path, 2, 6) == ["step-00000002"]


def test_a_step_of_another_user_is_said_and_is_not_absent() -> None:
    """Run as user nobody; root may read everything."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        tier = Path(name)
        tier.chmod(0o755)
        a_step(tier, 5).chmod(0o700)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(65534)
                os.write(write, repr(durable.list_steps(tier)).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        with open(read, "rb") as said:
            answer = said.read().decode()
        assert answer.startswith("([], {5: "), answer
        assert "this user may not do that there" in answer


@pytest.mark.parametrize("time", [-1e12, 0.0, 1e18])
def test_a_clock_that_jumped_changes_no_order(
    tmp_path: Path, time: float, capsys: pytest.CaptureFixture[str]
) -> None:
    a_step(tmp_path, 5)
    manifest = a_step(tmp_path, 6) / "manifest.json"
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**data, "time": time}))
    assert [each.step for each in durable.committed(tmp_path)] == [5, 6]
    assert main(["ls", str(tmp_path)]) == 0
    assert "newest committed: step 6" in capsys.readouterr().out
