"""A small training with a Checkpointer, beside a stand-in for robust-task's store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_checkpoint_store import FakeStore

from robust_slurm import Checkpointer

LONG = 30.0  # s; a bound that no passing test comes near


class Training:
    """A small training; its losses tell whether two of them are the same."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        given: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer,
            "extra": {"schedule": self.schedule, "note": "none"}, **options,
        }  # fmt: skip
        self.ckpt = Checkpointer(**given)

    def step(self, number: int, save: bool = True) -> float:
        x = torch.randn(4, 8)
        loss = (self.model(x) - x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.ckpt.extra["note"] = f"after {number}"
        if save:
            self.ckpt.save(number)
        return loss.item()

    def run(self, first: int, last: int) -> list[float]:
        return [self.step(number) for number in range(first, last + 1)]


@contextmanager
def fake_store(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    """A stand-in for robust-task's store, and its rank's environment."""
    made = FakeStore(directory)
    for name in list(os.environ):
        if name.startswith(("ROBUST_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ROBUST_CKPT_SOCKET", str(made.path))
    monkeypatch.setenv("ROBUST_EPOCH", "3")
    monkeypatch.setenv("ROBUST_RUN_ID", "77")
    try:
        yield made
    finally:
        made.die()


def restart(store: FakeStore, step: int, file: str) -> FakeStore:
    """The next epoch's welcome; the same store."""
    store.welcome["restore"] = {"step": step, "shards": {"0": file}, "tier": "memory"}
    return store


class CalledTraining:
    """A training whose script changes weights, schedule, average and tokens once a step."""

    def __init__(
        self, *, lacks: str = "", extra: dict[str, Any] | None = None, **options: Any
    ) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        given = {"schedule": self.schedule, "average": self.average, "tokens": 0, **(extra or {})}
        given.pop(lacks, None)
        self.ckpt = Checkpointer(model=self.model, optimizer=self.optimizer, extra=given, **options)
        self.ckpt.resume()

    @property
    def weight(self) -> torch.Tensor:
        return next(self.model.parameters())

    def backward(self) -> None:
        self.model(torch.randn(3, 6)).square().mean().backward()

    def rest(self, *, skip: str = "") -> None:
        for name in ("schedule", "average", "tokens"):
            if name != skip:
                self.finish(name)

    def finish(self, name: str) -> None:
        if name == "schedule":
            self.schedule.step()
        elif name == "average":
            self.average.update_parameters(self.model)
        else:
            self.ckpt.extra["tokens"] = self.ckpt.extra.get("tokens", 0) + 3

    def step(self, number: int) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rest()
        self.ckpt.save(number)
