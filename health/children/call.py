"""A function that may hang (a dead file system, a stuck process), called in a child."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from typing import Any

from health.children.child import Child, fork, where_it_hangs, write_all

_MOST = 8 << 20  # bytes of an answer


def call_in_child(
    work: Callable[[], Any], deadline_s: float, lost: Callable[[int, str], None] | None = None
) -> tuple[Any, str]:
    """Run ``work`` in a child; return its result (as JSON keeps it) and "", or None and why not.

    ``work`` has none of this process's descriptors. At the deadline its process is killed, or left
    behind if it cannot be: then ``lost`` gets its pid and what it does.
    """
    until = time.monotonic() + deadline_s
    try:
        child = fork(lambda fd: write_all(fd, _answer(work)), deadline_s)
    except OSError as error:
        return None, f"no child process: {error.strerror}"
    raw = None
    try:
        raw = _read(child, until)
    finally:
        where = where_it_hangs(child.pid) if raw is None and lost is not None else ""
        child.close()
        if not child.stop() and lost is not None:
            lost(child.pid, f"no answer in {deadline_s:g} s, {where}")
    if raw is None:
        return None, f"no answer in {deadline_s:g} s"
    try:
        answer = json.loads(raw)
    except ValueError:
        return None, "its process died"
    return answer.get("value"), str(answer.get("error", ""))


def _answer(work: Callable[[], Any]) -> bytes:
    answer: dict[str, Any]
    try:
        answer = {"value": work()}
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        answer = {"error": f"{where}{error.strerror or error}"}
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent must hear of it
        answer = {"error": f"{type(error).__name__}: {error}"}
    return json.dumps(answer, default=str).encode()


def _read(child: Child, until: float) -> bytes | None:
    """Read the child's pipe until its end; None at the deadline."""
    poll = select.poll()
    poll.register(child.fd, select.POLLIN)
    parts: list[bytes] = []
    size = 0
    while size < _MOST:
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        part = os.read(child.fd, 1 << 16)
        if not part:
            break
        size += len(part)
        parts.append(part)
    return b"".join(parts)
