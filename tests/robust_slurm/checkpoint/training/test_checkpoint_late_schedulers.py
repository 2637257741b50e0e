"""Schedulers that are stepped after save(), at any step, are named; those that are stepped at the
beginning of a step are not; nor is an optimizer's own switch of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_training import fake_store
from fake_checkpoint_store import FakeStore
from odd_scripts import Script, crash_and_resume, same
from torch.optim import lr_scheduler


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


class Epochs(Script):
    """Steps its scheduler once an epoch of 4 steps, after the epoch's last save()."""

    def make(self) -> None:
        self.schedule = lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": {"schedule": self.schedule}}

    def step(self, number: int) -> None:
        super().step(number)
        if number % 4 == 0:
            self.schedule.step()


class HeadOfStep(Epochs):
    """Steps it before each step."""

    every = 1

    def step(self, number: int) -> None:
        if (number - 1) % self.every == 0:
            self.schedule.step()
        Script.step(self, number)


class HeadOfEpoch(HeadOfStep):
    every = 2


class Trainer:
    """Holds its scheduler, and saves it."""

    def __init__(self, optimizer: Any) -> None:
        self.scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])


class TrainerEpochs(Epochs):
    def make(self) -> None:
        self.trainer = Trainer(self.optimizer)
        self.schedule = self.trainer.scheduler

    def given(self) -> dict[str, Any]:
        return {**Script.given(self), "extra": {"trainer": self.trainer}}


class WarmUp(Script):
    """Computes its rate from the step; the last step of the warm-up is the one that is saved."""

    def step(self, number: int) -> None:
        self.optimizer.param_groups[0]["lr"] = min(1.0, number / 5) / 100
        super().step(number)


class Switching(torch.optim.SGD):
    """Its weights are others in the mode of evaluations."""

    @torch.no_grad()
    def switch(self, train: bool) -> None:
        for group in self.param_groups:
            if group.setdefault("train_mode", True) != train:
                group["train_mode"] = train
                for p in group["params"]:
                    p.mul_(0.5 if train else 2.0)


class Evaluating(Script):
    """Saves in that mode, and switches back at the beginning of a step."""

    def make(self) -> None:
        self.optimizer = Switching(self.model.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        self.optimizer.switch(True)
        super().step(number)

    def after(self, number: int) -> None:
        self.optimizer.switch(False)


@pytest.mark.parametrize(
    ("script", "name"), [(Epochs, "extra.schedule"), (TrainerEpochs, "extra.trainer.scheduler")]
)
def test_what_an_epoch_steps_after_its_last_save_is_named(
    script: type[Script], name: str, store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    reference = script()
    reference.resume()
    for number in range(1, 7):
        reference.step(number)
    assert reference.ckpt is not None
    reference.ckpt._close(0.0)
    said = capfd.readouterr().err
    assert f"{name} changed between save(4) and the next optimizer step" in said
    assert said.count("robust-slurm:") == 1


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("script", [HeadOfStep, HeadOfEpoch, WarmUp, Evaluating])
def test_what_the_next_step_begins_with_is_met_with_silence(
    script: type[Script], store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    assert same(*crash_and_resume(script, store))
    assert capfd.readouterr().err == ""
