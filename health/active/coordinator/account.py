"""The unprivileged account of the processes that import torch when root starts the tests.

torch and its libraries are millions of lines that nobody has reviewed for use by root, and a test
needs no privilege but access to the devices.
"""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path
from typing import NamedTuple

VARIABLE = "ROBUST_TEST_USER"  # passes the account's name to the tasks of a step
_DEVICES = ("nvidia*", "nvidia-caps/*", "infiniband/*")


class DeviceAccount(NamedTuple):
    """``groups``: those of the devices, which a site may have given to a group of their own."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def account(name: str, dev: Path = Path("/dev")) -> DeviceAccount | None:
    """Return the account of this name; None: keep the current one. OSError: no such account."""
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
    """Switch to the account for good. Exec a new program then: this one's memory was root's."""
    os.setgroups(own.groups)
    os.setresgid(own.gid, own.gid, own.gid)
    os.setresuid(own.uid, own.uid, own.uid)
    os.environ["HOME"] = own.home
