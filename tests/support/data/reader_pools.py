"""Pools of readers for tests, which end with them; their feeds and processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import read_plan
from waiting import until

from robust_slurm.data.lanes.budget import ReadBudget
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.service.client import code_of
from robust_slurm.data.service.readers import staff
from robust_slurm.data.service.readers.pool import ReaderPool
from robust_slurm.data.steps import opener

READ_AHEAD = 8000  # bytes: some windows
Wanted = list[int]
Begin = Callable[..., ReaderPool]
NAME = "read_plan:plan"


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Wanted:
    """The number of readers that there are to be."""
    number = [2]
    monkeypatch.setattr(staff, "readers_wanted", lambda *_: number[0])
    monkeypatch.setattr(staff, "TICK", 0.02)
    return number


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Wanted) -> Iterator[Begin]:
    pools: list[ReaderPool] = []

    def begin(what: dict[int, str] | None = None, **options: Any) -> ReaderPool:
        monkeypatch.setenv("READ_PLAN", str(tmp_path / "sources"))
        monkeypatch.setenv("READ_PLAN_OPTIONS", json.dumps(options))
        monkeypatch.syspath_prepend(str(Path(read_plan.__file__).parent))
        read_plan.write(tmp_path / "sources" / "web", 4, 40, what)
        read_plan.write(tmp_path / "sources" / "code", 3, 25)
        pool = ReaderPool(read_plan.plan(), NAME, code_of(NAME), lambda: 0.0)
        pools.append(pool)
        until(lambda: pool.staff.count == wanted[0] and all(pool.staff._channels), "readers", 60)
        return pool

    yield begin
    for pool in pools:
        pool.staff.close()


def feed_of(pool: ReaderPool, lane: tuple[str, int], here: bool = False) -> LocalFeed:
    feed = (opener(pool._plan) if here else pool.open_feed)(lane, ReadBudget(READ_AHEAD))
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
