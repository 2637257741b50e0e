"""The steps of a data process where its successor finds them: in sockets that outlive it.

robust-task holds both ends of a pair of sockets and hands them to each data process that it
starts. A step waits in their queue as one message, with the descriptors of its memory, until
it is taken out again. A death at any moment leaves whole steps there. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from typing import TYPE_CHECKING

from robust_slurm.data.service.made_step import MadeStep
from robust_slurm.data.service.pages import SealedPage

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_FDS = 250
"""Descriptors in the queue, so that a message has no more than the kernel's 253 either. All that a
user's processes have on their way count against the limit of open files, often 1024, of each of
these processes that sends one."""


class KeptSteps:
    """``pair``: descriptors of the two sockets; () where nothing outlives this process. Not for
    several threads at once. What cannot be kept is not lost: the successor makes it again."""

    def __init__(self, pair: Sequence[int] = ()) -> None:
        self._ends = [socket.socket(fileno=fd) for fd in pair]
        for end in self._ends:
            end.setblocking(False)
        self._queued: deque[tuple[str, int]] = deque()  # names of steps, and their descriptors
        self.plan = ""
        """The identity of the plan that the steps are of; "": not known, and none are kept."""

    def inherit(self) -> list[MadeStep]:
        """Return the steps of the process before this one, and keep them further."""
        found: list[tuple[str, MadeStep]] = []
        while (fds := self._take()) is not None:
            try:
                found.append(_step(fds))
            except (OSError, ValueError, LookupError, TypeError):
                _close(fds[1:])
        self.plan = found[-1][0] if found else ""
        for plan, made in found:
            if plan != self.plan:
                made.close()
        steps = [made for plan, made in found if plan == self.plan]
        for made in steps:
            self.keep(made)
        return steps

    def keep(self, made: MadeStep) -> None:
        """Keep one step more; the oldest make room."""
        count = len(made.pages) + 1
        if not self._ends or not self.plan or count > MOST_FDS:
            return
        heads = [[share, page.size, page.arrays] for share, page in made.pages.items()]
        text = json.dumps([self.plan, made.before, made.number, heads, made.state, made.after])
        while sum(fds for _, fds in self._queued) + count > MOST_FDS:
            self.drop(self._queued[0][0])
        try:
            told = os.memfd_create("robust-data-step", os.MFD_CLOEXEC)
            try:
                with open(told, "wb", closefd=False) as file:
                    file.write(text.encode())
                fds = [told, *(page.fd for page in made.pages.values())]
                socket.send_fds(self._ends[0], [b"s"], fds)
            finally:
                os.close(told)
            self._queued.append((made.before, count))
        except OSError:  # without this one, those before it are of no use
            self.clear()

    def drop(self, before: str) -> None:
        """Drop the oldest step, if it is this one."""
        if self._queued and self._queued[0][0] == before:
            self._queued.popleft()
            _close(self._take() or [])

    def clear(self) -> None:
        """Drop all steps."""
        while (fds := self._take()) is not None:
            _close(fds)
        self._queued.clear()

    def _take(self) -> list[int] | None:
        """Return the descriptors of the oldest message; None if there is none."""
        if not self._ends:
            return None
        try:
            data, fds, _, _ = socket.recv_fds(self._ends[1], 1, MOST_FDS)
        except OSError:
            return None
        return list(fds) if data else None


def _step(fds: list[int]) -> tuple[str, MadeStep]:
    """Return a plan's identity, and a step. Raises OSError, ValueError, LookupError, TypeError."""
    with open(fds[0], "rb") as file:
        file.seek(0)  # its position is where the process that wrote it has left it
        plan, before, number, heads, state, after = json.load(file)
    if len(heads) != len(fds) - 1:
        raise ValueError("descriptors are missing")
    pages = {
        share: SealedPage(fd, size, arrays)
        for (share, size, arrays), fd in zip(heads, fds[1:])  # noqa: B905 - 3.9
    }
    return plan, MadeStep(before, number, pages, state, after)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
