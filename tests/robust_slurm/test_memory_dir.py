"""Directories in memory: gone with their process, or with the next one's start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from robust_slurm import memory_dir
from robust_slurm.memory_dir import MemoryDir, remove_stale

HOLD = """
import sys
from robust_slurm.memory_dir import MemoryDir
made = MemoryDir(sys.argv[1], sys.argv[2])
(made.path / "snapshot").write_text("x")
print(made.path, flush=True)
sys.stdin.read()
"""


def holder(name: str, base: Path) -> tuple[subprocess.Popen[str], Path]:
    argv = [sys.executable, "-c", HOLD, name, str(base)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_it_goes_with_its_owner(tmp_path: Path) -> None:
    made = MemoryDir("7.0", str(tmp_path))
    assert made.path.name.startswith("robust-7.0-") and made.path.stat().st_mode & 0o777 == 0o700
    (made.path / "deep").mkdir()
    made.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["7.0", "ckpt-1000"])
def test_the_next_one_removes_what_the_dead_have_left(tmp_path: Path, name: str) -> None:
    """Directories of dead shims and of dead trainings' stores go; those of the living stay."""
    living, kept = holder("ckpt-1000", tmp_path)
    other, kept_too = holder("8.1", tmp_path)
    dead, left = holder(name, tmp_path)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert left.exists()
    made = MemoryDir("9.0", str(tmp_path))
    try:
        assert sorted(tmp_path.iterdir()) == sorted([kept, kept_too, made.path])
        assert (kept / "snapshot").read_text() == (kept_too / "snapshot").read_text() == "x"
    finally:
        made.close()
        for process in (living, other):
            process.communicate("")


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "robust-1.0-filexxxx").write_text("")
    for own in ("mine", "robust-training", "robust-7b-datasets", "robust-7.0"):
        (tmp_path / own).mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "robust-1.0-linkxxxx").symlink_to(tmp_path / "target")
    if os.getuid() == 0:
        (tmp_path / "robust-1.0-othersxx").mkdir()
        os.chown(tmp_path / "robust-1.0-othersxx", 4711, 4711)
    before = sorted(tmp_path.iterdir())
    remove_stale(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == before
    remove_stale(str(tmp_path / "nowhere"))


AT_ONCE = """
import os, sys
from robust_slurm.memory_dir import MemoryDir
ranks = []
for _ in range(6):
    pid = os.fork()
    if not pid:
        for _ in range(150):
            made = MemoryDir("ckpt-0", sys.argv[1])
            (made.path / "snapshot").touch()
            made.close()
        os._exit(0)
    ranks.append(pid)
print([os.waitpid(rank, 0)[1] for rank in ranks])
"""


@pytest.mark.slow
def test_ranks_that_start_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    """A rank without a directory saves nothing, so the others wait for its part for ever."""
    argv = [sys.executable, "-c", AT_ONCE, str(tmp_path)]
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == f"{[0] * 6}\n", ran.stderr


def test_one_that_is_taken_for_stale_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, again = memory_dir.fcntl.flock, iter([True, False])

    def late(fd: int, how: int) -> None:
        if next(again):
            next(tmp_path.iterdir()).rmdir()
        lock(fd, how)

    monkeypatch.setattr(memory_dir.fcntl, "flock", late)
    made = MemoryDir("7.0", str(tmp_path))
    assert list(tmp_path.iterdir()) == [made.path]
    monkeypatch.undo()
    made.close()


def test_a_full_memory_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun the job would start; the first place is full, as by what an earlier job left."""
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    empty.mkdir()
    real = os.statvfs
    none = os.statvfs_result((4096, 4096, 100, 0, 0, 9, 9, 9, 0, 255))
    monkeypatch.setattr(memory_dir, "LOCAL", (str(full), str(empty)))
    monkeypatch.setattr(os, "statvfs", lambda place: none if place == str(full) else real(place))
    made = memory_dir.MemoryDir("1.0")
    assert made.path.parent == empty
    made.close()
