"""Stores that write to a durable tier, with a writer that can misbehave."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_stores import Events, FakeRank, stores

from robust_slurm.checkpoint.store.disk import archive
from robust_slurm.checkpoint.store.store import Store


@pytest.fixture(autouse=True)
def fake_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        archive,
        "writer_command",
        lambda python: [python, "-m", "tests.support.checkpoint.fake_checkpoint_writer"],
    )


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Store, Events]]:
    (tmp_path / "ckpt").mkdir()
    with stores(tmp_path, 1, key=None, write_deadline=30.0) as made:
        yield made[0]


def durable_rank(
    store: Store, tmp_path: Path, mode: str = "good", number: int = 0, **more: Any
) -> FakeRank:
    directory = str(tmp_path / "ckpt" / mode)
    rank = FakeRank(store, number, directory=directory, python=sys.executable, **more)
    rank.wait("welcome")
    return rank


def requests(tmp_path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(x) for x in (tmp_path / "ckpt/requests").read_text().splitlines()]
    except FileNotFoundError:
        return []


def commits(tmp_path: Path) -> list[tuple[str, int]]:
    return [(r["op"], r["step"]) for r in requests(tmp_path) if r["op"] == "commit"]
