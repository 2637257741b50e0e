"""Calls that use a shared file system, which may not answer: one process is lost to each, no more.

Who was lost is remembered until it ends, over all runs of the gate (``Stuck``), under the name
that a probe of the same mount has. So the next call on that file system is not made at all. Where
the process could be killed, later runs look first, and briefly, whether the file system answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

from health.children.call import call_in_child
from health.node.mountinfo import holding, resolve, visible
from health.node.stuck import Stuck

AGAIN = "it does not answer, as before"
"""The error of a call that was not made: whoever made the first one has told of it."""
_LOOK_S = 2.0
_BRIEF_S, _BRIEFLY_S = 0.5, 600.0  # a look at one that was silent, and how long it is so short

_NONE = "no answer"
_told: dict[str, str] = {}  # file systems that did not answer in this run, and how that showed


def call_on(
    path: str, work: Callable[[], Any], deadline_s: float, key: str = "", stuck: Stuck | None = None
) -> tuple[Any, str]:
    """Do ``work``, which uses the file system of ``path``, as ``call_in_child`` does.

    ``key``: what stands for it where a user can make it hang: a directory of his own.
    """
    lost = stuck or Stuck()
    mount = _key(path)
    mine = key or mount
    if any(name in _told or lost.still(name) for name in dict.fromkeys((mount, mine))):
        return None, AGAIN

    def remember(pid: int, why: str) -> None:
        lost.remember(mine, pid, why)

    since = lost.silent_for(mount)
    if since is not None:
        patience = min(deadline_s, _BRIEF_S if since < _BRIEFLY_S else _LOOK_S)
        # Unlike access(2), whose answer an NFS client may know, this one asks the server.
        if call_in_child(lambda: bool(os.statvfs(path)), patience, remember)[1].startswith(_NONE):
            if since >= _BRIEFLY_S:
                lost.was_silent(mount)
            _told[mount] = ""  # an earlier run has told of it
            return None, AGAIN
        lost.answered(mount)
    value, error = call_in_child(work, deadline_s, remember)
    if error.startswith(_NONE):
        _told[mine] = error
        if mine == mount:
            lost.was_silent(mount)
    return value, error


def answers(path: str) -> bool:
    """Look whether the file system of a directory answers, if only with an error."""
    error = call_on(path, lambda: os.access(path, os.R_OK), _LOOK_S)[1]
    return error != AGAIN and not first_silence(path)


def first_silence(path: str) -> str:
    """The way it showed that the file system of ``path`` is silent, if this run found it first.

    "": it answered, was not asked, or an earlier run's process still waits for it.
    """
    return _told.get(_key(path), "")


@cache
def _key(path: str) -> str:
    """The name of its file system: for all paths on a mount that may hang the same."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mounts = visible(file.read())
    except OSError:
        mounts = {}
    mount = holding(mounts, resolve(mounts, path, os.readlink))
    return f"probe {mount.point if mount is not None and mount.may_hang else path}"
