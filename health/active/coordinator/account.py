"""The account of the processes that import torch, where root starts the tests: no root's.

torch and what it loads are millions of lines that no gate has checked, and a test needs of root
nothing but the way to the devices.
"""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path
from typing import NamedTuple

VARIABLE = "ROBUST_TEST_USER"  # to a task of a step
_DEVICES = ("nvidia*", "nvidia-caps/*", "infiniband/*")


class DeviceAccount(NamedTuple):
    """``groups``: those of the devices, which a site may have given to a group of their own."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def account(name: str, dev: Path = Path("/dev")) -> DeviceAccount | None:
    """The account of this name; None: stay who we are. OSError: there is none."""
    if not name or os.geteuid() != 0:
        return None
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise OSError(errno.ENOENT, "no such account ([active] user)", name) from None
    if found.pw_uid == 0:
        return None
    files = (path for pattern in _DEVICES for path in dev.glob(pattern))
    groups = {path.stat().st_gid for path in files} - {0}
    return DeviceAccount(found.pw_uid, found.pw_gid, tuple(sorted(groups)), found.pw_dir)


def become(own: DeviceAccount) -> None:
    """For good. What follows should be a new program: this one's memory was root's."""
    os.setgroups(own.groups)
    os.setresgid(own.gid, own.gid, own.gid)
    os.setresuid(own.uid, own.uid, own.uid)
    os.environ["HOME"] = own.home
