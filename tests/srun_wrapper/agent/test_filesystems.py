"""Shared file systems that do not answer: which mounts are asked, and what is silent."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from srun_wrapper.agent import filesystems
from srun_wrapper.agent.filesystems import (
    UsedMount,
    command_paths,
    mount_of,
    parse_mounts,
    shared_points,
)

INFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / /home rw - nfs4 server:/home rw,vers=4.2
31 30 0:27 / /home/big\\040data ro,nosuid shared:5 master:1 - lustre mgs@tcp:/big rw
32 22 0:28 / /local rw - xfs /dev/nvme0n1 rw
33 22 0:29 / /s3 rw - fuse.s3fs s3fs rw
34 22 0:30 / /homework rw - tmpfs tmpfs rw
a line that makes no sense
"""


def test_mounts_are_read() -> None:
    assert [(m.point, m.kind, m.shared) for m in parse_mounts(INFO)] == [
        ("/", "ext4", False),
        ("/home", "nfs4", True),
        ("/home/big data", "lustre", True),
        ("/local", "xfs", False),
        ("/s3", "fuse.s3fs", True),
        ("/homework", "tmpfs", False),
    ]


@pytest.mark.parametrize(
    ("path", "point"),
    [
        ("/etc/hosts", "/"),
        ("/", "/"),
        ("/home", "/home"),
        ("/home/me/train.py", "/home"),
        ("/homework/x", "/homework"),
        ("/home/big data/1.tar", "/home/big data"),
        ("/home/big", "/home"),
    ],
)
def test_the_mount_of_a_path(path: str, point: str) -> None:
    found = mount_of(path, parse_mounts(INFO))
    assert found is not None and found.point == point


def test_of_two_mounts_at_one_place_the_last_counts() -> None:
    mounts = [UsedMount("/", "ext4"), UsedMount("/data", "autofs"), UsedMount("/data", "nfs")]
    assert shared_points(["/data/x"], mounts) == {"/data"}


def test_only_shared_file_systems_are_asked() -> None:
    paths = ["/etc/hosts", "/local/x", "/home/me/x", "/s3/y", "pipe:[12]", "relative"]
    assert shared_points(paths, parse_mounts(INFO)) == {"/home", "/s3"}
    root = [UsedMount("/", "nfs")]
    assert shared_points([], root) == {"/"}  # a node without disks


def test_paths_of_a_command() -> None:
    env = {"PATH": "/usr/bin:/home/env/bin", "PYTHONPATH": "", "OTHER": "/x"}
    found = command_paths(["python", "/home/me/train.py", "--lr=1"], env, "/work")
    assert {"/work", "/home/me/train.py", "/work/python", "/usr/bin", "/home/env/bin"} <= found
    assert "/x" not in found


def test_paths_that_a_process_uses(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    code = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(kept)],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = filesystems.used_paths(process.pid)
        process.kill()
    assert {str(tmp_path), str(kept), os.path.realpath(sys.executable)} <= found
    assert filesystems.used_paths(process.pid) == set()


def test_what_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    asked: list[str] = []

    def statvfs(point: str) -> None:
        asked.append(point)
        if point == "/slow":
            goes_on.wait(30.0)
        if point == "/gone":
            raise OSError("stale file handle")

    monkeypatch.setattr(os, "statvfs", statvfs)
    points, began = ["/slow", "/well", "/gone"], time.monotonic()
    assert filesystems.silent(points, 0.2) == ("/slow",)
    assert filesystems.silent(points, 0.0) == ("/slow",)
    assert asked.count("/slow") == 1  # one question at a time
    assert set(filesystems.answering(began)) & set(points) == {"/well"}  # "/gone" is no sign
    goes_on.set()
    assert filesystems.silent(points, 30.0) == ()
    assert "/slow" in filesystems.answering(began)
    assert not set(filesystems.answering(time.monotonic())) & set(points)


def test_nothing_is_looked_at_without_shared_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "used_paths", lambda _pid: pytest.fail("looked"))
    local = "\n".join(line for line in INFO.splitlines() if " ext4 " in line or " xfs " in line)
    assert filesystems.silent_mounts([os.getpid()], ["/local"], 0.0, local) == ()


def test_a_mapped_file_whose_name_is_no_text(tmp_path: Path) -> None:
    """An error here would end the node's looks, and its answers to inspections, for good."""
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.bin")
    Path(name).write_bytes(b"x" * 4096)
    with open(name, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert any(path.endswith(".bin") for path in filesystems.used_paths(os.getpid()))


def test_no_thread_to_ask_with_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert filesystems.silent(["/"], 1.0) == ()
    monkeypatch.undo()
    assert filesystems.silent(["/"], 10.0) == ()
