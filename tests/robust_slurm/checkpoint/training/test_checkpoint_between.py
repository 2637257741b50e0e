"""Changes between save() and the next step: silent if they are made again, named if they are lost;
and modes, which no state_dict() has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_training import fake_store
from fake_checkpoint_store import FakeStore
from odd_scripts import Script, crash_and_resume, same
from torch import nn


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


class Schedule(Script):
    """Computes its rate from the step, before the step."""

    late = False

    def make(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def step(self, number: int) -> None:
        if not self.late:
            self.optimizer.param_groups[0]["lr"] = 1 / number
        super().step(number)
        if self.late:
            self.optimizer.param_groups[0]["lr"] *= 0.8


class LateSchedule(Schedule):
    late = True


class Buffer:
    """A replay buffer of the script's own, with a state."""

    def __init__(self) -> None:
        self.items: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


class Collecting(Script):
    """Fills its buffer before it trains."""

    late = False

    def make(self) -> None:
        self.buffer = Buffer()

    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": {"buffer": self.buffer}}

    def collect(self) -> None:
        self.buffer.items.append(float(self.model(torch.ones(6)).sum()))

    def step(self, number: int) -> None:
        if not self.late:
            self.collect()
        super().step(number)
        if self.late:
            self.collect()

    def state(self) -> list[Any]:
        return [*super().state(), self.buffer.items]


class LateCollecting(Collecting):
    late = True


class Frozen(Script):
    """Puts a layer into eval() in mid-run."""

    def make(self) -> None:
        self.model.append(nn.BatchNorm1d(6))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def after(self, number: int) -> None:
        if number == 3:
            self.model[-1].eval()

    def state(self) -> list[Any]:
        return [*super().state(), self.model[-1].training, self.model.training]


class Codebook(nn.Sequential):
    """Its forward pass changes a parameter that no optimizer has."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.codes = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.data = self.codes.lerp(x.mean(0), 0.1)
        return super().forward(x) + self.codes


class Quantised(Script):
    def make(self) -> None:
        self.model = Codebook(*self.model)
        self.optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1
        )


class LateQuantised(Quantised):
    """Changes it after save() instead."""

    def make(self) -> None:
        self.codes = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.model.register_parameter("codes", self.codes)
        self.optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad], lr=0.1
        )

    def step(self, number: int) -> None:
        super().step(number)
        self.codes.data += 1


@pytest.mark.parametrize("script", [Schedule, Collecting, Frozen, Quantised])
def test_what_is_done_again_or_restored_is_met_with_silence(
    script: type[Script], store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    assert same(*crash_and_resume(script, store))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (LateSchedule, "optimizer.param_groups.lr"),
        (LateCollecting, "extra.buffer"),
        (LateQuantised, "model.codes"),
    ],
)
def test_what_was_changed_after_save_and_is_lost_is_named(
    script: type[Script], name: str, store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    crash_and_resume(script, store)
    assert f"{name} changed after each save() in the run that saved" in capfd.readouterr().err
