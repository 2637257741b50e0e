"""An attack apart from everything else: mounts and processes of its own, which end with it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench.attacks.attack import Got
from bench.attacks.room import Room
from bench.common import BenchError
from lab import linux


def apart(work: Callable[[Room], Got], room: Room, seconds: float) -> Got:
    """Run an attack in a child with mounts and processes of its own, all of which end with it.

    BenchError if it raises or takes too long.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _inside(work, room, theirs)
    os.close(theirs)
    try:
        answer = _read(ours, time.monotonic() + seconds)
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if answer is None:
        raise BenchError(f"no end after {seconds:g} s")
    if isinstance(answer, Got):
        return answer
    raise BenchError(str(answer))


def _read(pipe: int, deadline: float) -> Got | str | None:
    raw = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            if not (more := os.read(pipe, 1 << 16)):
                answer = json.loads(raw or '"it ended without an answer"')
                return Got(**answer) if isinstance(answer, dict) else str(answer)
            raw += more
    return None


def _inside(work: Callable[[Room], Got], room: Room, pipe: int) -> None:
    """Run in the child: a PID namespace whose first process ends all that the attack began."""
    try:
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID)
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
        if (first := os.fork()) == 0:
            linux.die_with_parent()
            linux.mount("proc", "/proc", "proc")
            try:
                answer: dict[str, Any] | str = asdict(work(room))
            except Exception as error:  # noqa: BLE001 - it is the attack's outcome: void
                answer = f"{type(error).__name__}: {error}"
            os.write(pipe, json.dumps(answer).encode())
            os._exit(0)
        os.close(pipe)
        os.waitpid(first, 0)
    finally:
        os._exit(0)
