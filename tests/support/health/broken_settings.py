"""Checks with settings, and the ways in which robust.toml can be spoilt."""

from __future__ import annotations

import os
from pathlib import Path

from health.check import Check, Setting
from health.settings_file import FILE_LIMIT

CHECKS = (
    Check(
        "disk",
        lambda system: [],
        (),
        {
            "minimum": Setting(5.0, "free space", "GiB"),
            "paths": Setting(["/"], "what to look at"),
            "strict": Setting(False, "all of it"),
            "count": Setting(-1, "how many"),
            "kind": Setting("any", "which"),
            "limits": Setting({"/": 1.0}, "by path", "GiB"),
            "free": Setting({}, "anything"),
        },
    ),
    Check("xid", lambda system: [], (), {"days": Setting(7, "looks back")}),
)


def by_others(path: Path) -> None:
    path.chmod(0o664)


def foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o644)


def huge(path: Path) -> None:
    path.write_bytes(b"#" * (FILE_LIMIT + 1))


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


UNSAFE = [
    (by_others, "can be written by others"),
    (foreign, "belongs to uid 12345"),
    (link, "is a link"),
    (fifo, "not a regular file"),
    (huge, "larger than"),
    (binary, "invalid start byte"),
]
