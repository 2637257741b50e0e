"""A link that is slower than training: saved less often, and training is as fast as without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from store_process import StoreProcess
from waiting import until

from robust_slurm import Checkpointer
from robust_slurm.checkpoint.planning import interval
from robust_slurm.checkpoint.planning.interval import Interval

STEP = 0.05  # s
RATE = 2e6  # bytes/s
SIZE = 2_000_000  # bytes: many steps long on the link
DEADLINE = 120.0  # s


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[tuple[StoreProcess, StoreProcess]]:
    made = [StoreProcess(tmp_path / name, bandwidth=RATE) for name in ("a", "b")]
    yield made[0], made[1]
    for each in made:
        each.close()


class Training:
    """Steps of STEP s beside a store."""

    def __init__(self, store: StoreProcess, patch: pytest.MonkeyPatch, size: int = SIZE) -> None:
        patch.setenv("ROBUST_CKPT_SOCKET", str(store.socket))
        patch.setenv("ROBUST_EPOCH", "0")
        self.model = torch.nn.Linear(size // 4 - 1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ckpt = Checkpointer(model=self.model, optimizer=self.optimizer)
        self.step = self.ckpt.resume()

    def run(self, steps: int) -> float:
        """Seconds a step."""
        began = time.perf_counter()
        for _ in range(steps):
            time.sleep(STEP)  # as on an accelerator
            for parameter in self.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            self.optimizer.step()
            self.step += 1
            self.ckpt.save(self.step)
        return (time.perf_counter() - began) / steps


@pytest.mark.slow
def test_the_interval_widens_until_training_is_not_slowed(
    peers: tuple[StoreProcess, StoreProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interval, "WIDEN", 0.0)
    a, b = peers
    training, pace = Training(a, monkeypatch), Interval(0.03)
    a.place(0, b)
    slow = training.run(6)
    assert slow > 6 * STEP
    for step, cost in a.costs():
        pace.hear(0, step, cost)
    assert pace.adjust(1.0, training.step + 1)
    assert pace.every >= 4
    a.save_every(pace.every, pace.first)
    training.run(pace.every + 1)  # what is on its way when it is heard
    before = training.ckpt.stats.snapshots
    fast = training.run(3 * pace.every)
    assert 2 <= training.ckpt.stats.snapshots - before <= 3
    assert fast < slow / 2
    replicas = {held["step"] for held in b.stock() if held["tier"] == "replica"}
    assert len([step for step in replicas if step % pace.every == 0]) >= 2
    training.ckpt.close()


@pytest.mark.slow
def test_the_interval_narrows_when_the_link_recovers(
    peers: tuple[StoreProcess, StoreProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WIDEN", "NARROW"):
        monkeypatch.setattr(interval, name, 0.0)
    a, b = peers
    training, pace = Training(a, monkeypatch, SIZE // 4), Interval(0.03)
    a.place(0, b)
    heard = 0

    def change() -> None:
        """Train until the interval changes. Nothing but steps comes between two questions: a
        pause would give the link time."""
        nonlocal heard
        give_up_at = time.monotonic() + DEADLINE
        while not pace.adjust(time.monotonic(), training.step + 1):
            assert time.monotonic() < give_up_at, f"the interval stays at {pace.every}"
            training.run(pace.every)
            costs = a.costs()
            for step, cost in costs[heard:]:
                pace.hear(0, step, cost)
            heard = len(costs)
        a.save_every(pace.every, pace.first)

    change()
    wide = pace.every
    assert wide > 1  # by how much depends on how long a step takes here
    a.open_link()
    while pace.every >= wide:
        change()
    narrowed = pace.first

    def replicas() -> list[int]:
        training.run(1)
        return [held["step"] for held in b.stock() if held["tier"] == "replica"]

    until(
        lambda: [step for step in replicas() if step > narrowed and step % wide],
        "a replica of a step that was not saved before",
    )
    training.ckpt.close()
