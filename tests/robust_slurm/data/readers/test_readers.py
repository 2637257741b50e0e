"""Readers in processes of their own: the same samples as here, whatever becomes of a process."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import read_plan
from waiting import until

from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes.budget import Budget
from robust_slurm.data.lanes.feed import Feed
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.readers import staff
from robust_slurm.data.readers.pool import ReaderPool
from robust_slurm.data.service.client import code_of
from robust_slurm.data.steps import opener

NAME = "read_plan:plan"
Wanted = list[int]
Begin = Callable[..., ReaderPool]


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Wanted:
    """The number of readers that there are to be."""
    number = [2]
    monkeypatch.setattr(staff, "readers_wanted", lambda *_: number[0])
    monkeypatch.setattr(staff, "TICK", 0.02)
    return number


@pytest.fixture
def begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Wanted
) -> Iterator[Begin]:
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


def feeds_of(pool: ReaderPool, here: bool = False) -> dict[tuple[str, int], Feed]:
    budget = Budget(1 << 20)
    open_feed = opener(pool._plan) if here else pool.open_feed
    return {lane: open_feed(lane, budget) for lane in pool._lanes}


def given(feed: Feed, count: int, start: Position = Position()) -> list[Any]:
    feed.seek(start)
    found = []
    for _ in range(count):
        meta, after = feed.next()
        (sample,) = feed.take([meta.ref])
        assert sample.meta == meta
        found.append((meta, after, sample.values["tokens"].tolist(), sample.values["text"]))
    feed.close()
    return found


def pids(pool: ReaderPool) -> list[int]:
    assert pool.staff._spawner is not None
    server = pool.staff._spawner._process.pid
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [int(pid) for pid in children]


def test_lanes_give_what_they_give_here_though_readers_are_killed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(staff, "DEATHS", 10_000)
    pool = begin()
    pool.staff._deaths = type(pool.staff._deaths)(maxlen=10_000)
    monkeypatch.setattr("robust_slurm.data.readers.pool.SAME", 100)
    stop = threading.Event()
    killed = []

    def kill() -> None:
        chance = random.Random(7)
        while not stop.wait(chance.uniform(0.0, 0.05)):
            for pid in pids(pool)[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        until(lambda: bool(killed), "the first death")
        for (lane, feed), own in zip(
            feeds_of(pool).items(), feeds_of(pool, here=True).values(), strict=True
        ):
            found = given(feed, 250)
            assert found == given(own, 250), lane
            assert given(feed, 30, found[77][1]) == found[78:108]
    finally:
        stop.set()
        killer.join()
    until(lambda: "a reader was killed by SIGKILL; another goes on" in capfd.readouterr().err, "said")
    assert len(set(killed)) > 3
    figures = [feed.figures() for feed in feeds_of(pool).values()]  # type: ignore[attr-defined]
    assert len(figures) == 4
