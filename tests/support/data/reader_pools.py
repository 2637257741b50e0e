"""Feeds of readers, and the processes of these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from robust_slurm.data.lanes.budget import Budget
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.service.readers.pool import ReaderPool
from robust_slurm.data.steps import opener

READ_AHEAD = 8000  # bytes: some windows
Wanted = list[int]
Begin = Callable[..., ReaderPool]


def feed_of(pool: ReaderPool, lane: tuple[str, int], here: bool = False) -> LocalFeed:
    feed = (opener(pool._plan) if here else pool.open_feed)(lane, Budget(READ_AHEAD))
    assert isinstance(feed, LocalFeed)
    return feed


def given(
    feed: LocalFeed, count: int, start: Position | None = None, each: Callable[[], object] = int
) -> list[Any]:
    feed.seek(start or Position())
    found = []
    for _ in range(count):
        each()
        meta, after = feed.next()
        (sample,) = feed.take([meta.ref])
        assert sample.meta == meta
        found.append((meta, after, sample.values["tokens"].tolist(), sample.values["text"]))
    feed.close()
    return found


def pids(pool: ReaderPool) -> list[int]:
    assert pool.staff._spawner is not None
    return children(pool.staff._spawner._process.pid)


def children(parent: int) -> list[int]:
    found = []
    for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if " Z " not in Path(f"/proc/{pid}/stat").read_text():
                found.append(int(pid))
    return found
