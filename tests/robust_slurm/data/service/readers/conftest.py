"""Pools of readers for tests, which end with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import read_plan
from reader_pools import Begin, Wanted
from waiting import until

from robust_slurm.data.service.client import code_of
from robust_slurm.data.service.readers import staff
from robust_slurm.data.service.readers.pool import ReaderPool

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
