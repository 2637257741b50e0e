"""The order of a script's calls: what comes after save(), or is lost before it, is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpointed_training import CalledTraining, fake_store
from fake_checkpoint_store import FakeStore


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


def test_steps_that_a_gradient_scaler_leaves_out_are_no_trouble(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    script = CalledTraining()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number in range(1, 10):
        loss = script.model(torch.randn(3, 6)).square().mean() * (
            1e39 if number in (2, 3, 6) else 1
        )
        scaler.scale(loss).backward()
        scaler.step(script.optimizer)
        scaler.update()
        script.rest()
        script.ckpt.save(number)
        script.optimizer.zero_grad()
    script.ckpt.close()
    assert capfd.readouterr().err == ""
    assert [m["step"] for m in store.wait("saved", 9)] == list(range(1, 10))


@pytest.mark.parametrize("name", ["schedule", "average", "tokens"])
def test_what_comes_after_save_is_named(
    store: FakeStore, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = CalledTraining()
    for number in range(1, 4):
        script.backward()
        script.optimizer.step()
        script.rest(skip=name)
        script.ckpt.save(number)
        script.finish(name)
    script.ckpt.close()
    said = capfd.readouterr().err
    assert f"extra.{name} changed between save(1) and the next optimizer step" in said
    assert "Call save() last" in said and said.count("robust-slurm:") == 1


@pytest.mark.parametrize("zero", ["none", "zeros", "late"])
def test_the_right_order_is_met_with_silence(
    store: FakeStore, zero: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whenever the gradients are cleared, and with accumulation over two batches."""
    script = CalledTraining(extra={"generator": torch.Generator()})
    for number in range(1, 6):
        if zero == "late":
            script.optimizer.zero_grad()
        script.backward()
        script.backward()
        script.optimizer.step()
        if zero != "late":
            script.optimizer.zero_grad(set_to_none=zero == "none")
        script.rest()
        script.ckpt.save(number)
        script.ckpt.extra["generator"].manual_seed(number)  # as the next step draws from it
    script.ckpt.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("where", ["before the step", "while accumulating"])
def test_gradients_that_would_be_lost_are_named(
    store: FakeStore, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = CalledTraining()
    for number in range(1, 4):
        script.backward()
        if where == "before the step" or number % 2:
            script.ckpt.save(number)
        if where == "before the step" or not number % 2:
            script.optimizer.step()
            script.optimizer.zero_grad()
    script.ckpt.close()
    said = capfd.readouterr().err
    assert "save(1) comes before an optimizer step has used the gradients of optimizer: 0.w" in said


def test_a_schedule_that_nobody_saves_is_named(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    script = CalledTraining(lacks="schedule")
    script.step(1)
    script.ckpt.close()
    assert "optimizer: a learning-rate scheduler steps with it" in capfd.readouterr().err
