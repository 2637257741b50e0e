"""The epilog removes the user's files and shared memory, and nobody else's."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import pytest
from isolated import isolated
from job_leftovers import (
    OTHER,
    UID,
    clear,
    make,
    make_dir,
    needs_root,
    own,
    sleeper,
    wait_old_enough,
)

from health.leftovers import files

NOW = time.time
SHM = """ key shmid perms size cpid lpid nattch   uid   gid  cuid  cgid atime dtime ctime rss swap
   0     3   600 4096 1001 1001      0 20001 20001 20001 20001     0     0  1000   0    0
   0     4   600 4096 1001 1001      0 20002 20001 20002 20001     0     0  1000   0    0
   0     5   600 4096 1001 1001      0 20001 20001 20002 20001     0     0  1000   0    0
   0     6   600 4096 1001 1001      0 20001 20001 20001 20001     0     0  2000   0    0
"""


def test_ipc_of_the_user_and_old_enough() -> None:
    assert files.ipc_of(SHM, UID, 1500.0) == [3]
    assert files.ipc_of("", UID, 1500.0) == files.ipc_of("junk\nmore", UID, 1500.0) == []


def clear_dir(path: Path) -> tuple[int, list[str]]:
    return files.clear_dir(str(path), UID, NOW() + 5, time.monotonic() + 10)


@needs_root
def test_files_of_the_user_go_and_others_stay(tmp_path: Path) -> None:
    make(tmp_path / "mine")
    make(tmp_path / "other", OTHER)
    tree = make_dir(tmp_path / "robust-7-abc")
    make(make_dir(tree / "deep") / "file")
    os.mkfifo(tree / "fifo")
    own(tree / "fifo")
    hostile = make(tmp_path / "a\nb \x1b[2J ..")
    assert clear_dir(tmp_path) == (6, [])
    assert [p.name for p in tmp_path.iterdir()] == ["other"]
    assert not hostile.exists()


@needs_root
def test_links_are_removed_not_followed(tmp_path: Path) -> None:
    victim = make_dir(tmp_path / "victim")
    make(victim / "keep")
    base = make_dir(tmp_path / "base", 0)
    own_tree = make_dir(base / "tree")
    for place in (base / "link", own_tree / "link"):
        place.symlink_to(victim)
        own(place)
    os.link(make(tmp_path / "hard"), base / "hard")
    clear_dir(base)
    assert (victim / "keep").exists() and (tmp_path / "hard").exists()
    assert list(base.iterdir()) == []


@needs_root
def test_nothing_hides_in_the_depth(tmp_path: Path) -> None:
    levels = 3 * files._DEPTH
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 200, dir_fd=fd)  # a path longer than PATH_MAX
        os.chown("d" * 200, UID, UID, dir_fd=fd)
        above, fd = fd, os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(above)
    os.close(fd)
    assert clear_dir(tmp_path) == (levels, [])
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_what_others_put_into_the_users_directory_stays(tmp_path: Path) -> None:
    tree = make_dir(tmp_path / "tree")
    make(tree / "mine")
    inner = make_dir(tree / "others", OTHER)
    make(inner / "file", OTHER)
    removed, stayed = clear_dir(tmp_path)
    assert removed == 1 and stayed == ["tree/others: not the user's"]
    assert (inner / "file").exists()


@needs_root
def test_what_is_younger_than_the_look_stays(tmp_path: Path) -> None:
    make(tmp_path / "of-the-next-job")
    assert files.clear_dir(str(tmp_path), UID, NOW() - 5, time.monotonic() + 10) == (0, [])


@needs_root
def test_what_is_younger_stays_at_every_depth(tmp_path: Path) -> None:
    """Another job of the user, which has come since, writes into a directory that was there."""
    inner = make_dir(make_dir(tmp_path / "cache") / "deep")
    old = make(inner / "old")
    wait_old_enough(max(p.stat().st_ctime for p in (old, inner, inner.parent)))
    before = NOW()
    wait_old_enough(before)
    old.write_text("of the next job")  # which changes nothing of its directory
    make(tmp_path / "young")
    assert files.clear_dir(str(tmp_path), UID, before, time.monotonic() + 10) == (0, [])
    assert old.read_text() == "of the next job"
    assert files.clear_dir(str(tmp_path), UID, NOW() + 5, time.monotonic() + 10) == (4, [])


@isolated
def test_no_other_file_system_is_entered() -> None:
    from lab import linux

    tree = make_dir(Path("/dev/shm/tree"))
    inside = make_dir(tree / "mounted")
    linux.mount("tmpfs", str(inside), "tmpfs", 0, f"mode=755,uid={UID}")
    make(inside / "keep")
    removed, stayed = clear_dir(Path("/dev/shm"))
    assert removed == 0 and (inside / "keep").exists()
    assert "tree/mounted/another file system" in stayed


@needs_root
def test_a_directory_exchanged_for_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user wins the race between the look and the opening."""
    victim = make_dir(tmp_path / "victim", OTHER)
    make(victim / "keep")
    base = make_dir(tmp_path / "base", 0)
    tree = make_dir(base / "tree")
    real = os.lstat

    def exchanged(path: Any, **at: Any) -> os.stat_result:
        info = real(path, **at)
        if path == "tree" and not tree.is_symlink():
            tree.rmdir()
            tree.symlink_to(victim)
            own(tree)
        return info

    monkeypatch.setattr(os, "lstat", exchanged)
    assert clear_dir(base)[0] == 0
    assert (victim / "keep").exists()

    monkeypatch.undo()
    tree.unlink()
    make_dir(tree)

    def moved(path: Any, **at: Any) -> os.stat_result:
        info = real(path, **at)
        if path == "tree" and victim.exists():
            tree.rmdir()
            victim.rename(tree)
        return info

    monkeypatch.setattr(os, "lstat", moved)
    removed, stayed = clear_dir(base)
    assert removed == 0 and "tree/not the user's" in stayed
    assert (tree / "keep").exists()


@needs_root
def test_it_ends_with_its_time(tmp_path: Path) -> None:
    make(tmp_path / "mine")
    assert files.clear_dir(str(tmp_path), UID, NOW() + 5, time.monotonic() - 1) == (
        0,
        ["no time for the rest"],
    )


@isolated
def test_memory_and_directories_go_when_the_user_is_alone(tmp_path: Path) -> None:
    _as_user(_make_ipc)
    assert _ipc() == {"shm": 1, "sem": 1, "msg": 1}
    scratch = make_dir(tmp_path / "scratch", 0)
    made = [make(Path("/dev/shm/robust-7-x")), make(scratch / "mine")]
    wait_old_enough(_ipc_changed() + 1, *(path.stat().st_ctime for path in made))
    result = clear(dirs=["/dev/shm", str(scratch), str(tmp_path / "absent")])
    assert result.removed == 5
    assert _ipc() == {"shm": 0, "sem": 0, "msg": 0}
    assert [f.check for f in result.findings] == ["leftover-files"]
    assert "absent/No such file" in result.findings[0].evidence
    assert result.findings[0].status == "WARN"


@isolated
def test_snapshots_of_the_job_go_though_its_user_has_another_job_here() -> None:
    sleeper(SLURM_JOB_ID="8")  # ends with the test's namespace
    made = [Path("/dev/shm/robust-7.0-abc"), Path("/dev/shm/robust-8.0-x")]
    for path in made:
        make(make_dir(path) / "snapshot")
    others = make_dir(Path("/dev/shm/robust-7.0-theirs"), OTHER)
    wait_old_enough(*(path.stat().st_ctime for path in made))
    result = clear("job", dirs=["/dev/shm"])
    assert (result.removed, result.findings) == (2, [])
    assert [path.exists() for path in (*made, others)] == [False, True, True]


def _make_ipc() -> None:
    libc = ctypes.CDLL(None)
    assert libc.shmget(0, ctypes.c_size_t(4096), 0o1600) >= 0
    assert libc.semget(0, 1, 0o1600) >= 0
    assert libc.msgget(0, 0o1600) >= 0


def _as_user(work: Any) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _ipc() -> dict[str, int]:
    kinds = ("shm", "sem", "msg")
    return {k: len(Path(f"/proc/sysvipc/{k}").read_text().splitlines()) - 1 for k in kinds}


def _ipc_changed() -> int:
    """Return when the youngest System V object changed, in whole seconds as these tell it."""
    changed = []
    for kind in ("shm", "sem", "msg"):
        lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
        head, *rows = (line.split() for line in lines)
        changed += [int(row[head.index("ctime")]) for row in rows]
    return max(changed)
