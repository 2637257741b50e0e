"""A test body in namespaces of its own, with other processes, /dev/shm and IPC than the host's."""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from lab import linux

_SPACES = linux.CLONE_NEWPID | linux.CLONE_NEWNS | linux.CLONE_NEWIPC
_PR_SET_PDEATHSIG = 1
DEADLINE_S = 240.0  # a fork of a process with torch takes long on a machine that is busy


def isolated(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in new namespaces (needs root), gone with it; what it raises fails the test."""

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if os.geteuid() != 0:
            pytest.skip("needs root (namespaces)")
        said = _run(lambda: test(*args, **kwargs))
        assert said == "ok", said

    return wrapped


def _run(body: Callable[[], None]) -> str:
    ours, theirs = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            linux.unshare(_SPACES)
            first = os.fork()
            if first == 0:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                _first(body, theirs)
            os.close(theirs)
            os.waitpid(first, 0)
        finally:
            os._exit(0)
    os.close(theirs)
    parts: list[bytes] = []
    try:
        while select.select([ours], [], [], DEADLINE_S)[0]:
            part = os.read(ours, 1 << 16)
            if not part:
                break
            parts.append(part)
        else:
            return f"no end in {DEADLINE_S:g} s"
    finally:
        os.close(ours)
        os.kill(middle, signal.SIGKILL)  # and with it PID 1, and with that all of the namespace
        os.waitpid(middle, 0)
    return b"".join(parts).decode(errors="replace")


def _first(body: Callable[[], None], pipe: int) -> None:
    """PID 1: reaps what the test orphans, and ends with the test."""
    test = os.fork()
    if test == 0:
        _inside(body, pipe)
    os.close(pipe)
    while os.wait()[0] != test:
        pass
    os._exit(0)


def _inside(body: Callable[[], None], pipe: int) -> None:
    try:
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)
        linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")
        body()
        os.write(pipe, b"ok")
    except BaseException:  # noqa: BLE001 - a forked child must never return to pytest
        os.write(pipe, traceback.format_exc().encode()[-8000:])
    finally:
        os._exit(0)
