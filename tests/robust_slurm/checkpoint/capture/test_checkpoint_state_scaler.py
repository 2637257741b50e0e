"""Gradient scalers: saved without a wait for their device, restored as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_files import restore, source, write
from torch import nn

from robust_slurm.checkpoint.capture.state import OpenedSnapshot, State


def saved(tmp_path: Path, scaler: torch.amp.GradScaler) -> OpenedSnapshot:
    captured = State({"extra.scaler": scaler}, rank=0).capture()
    return source(write(tmp_path / "s.safetensors", *captured))


def scaled(scaler: torch.amp.GradScaler, times: int) -> None:
    """Steps of an optimizer; the scale grows at every second one."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(times):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("begun", [False, True])
def test_a_gradient_scaler_goes_on_without_a_wait_for_its_device(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor.item() waits for the device: save() has no use for it."""
    first = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaled(first, 3)
    state = State({"extra.scaler": first}, rank=0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "item", None)
        captured = state.capture()
    opened = source(write(tmp_path / "s.safetensors", *captured))
    second = torch.amp.GradScaler("cpu", growth_interval=2)
    if begun:
        scaled(second, 1)
    restore({"extra.scaler": second}, [opened], rank=0)
    assert second.state_dict() == first.state_dict()
    assert second.get_scale() == 16.0
    for each in (first, second):
        scaled(each, 3)
    assert second.state_dict() == first.state_dict()


def test_a_gradient_scaler_reads_what_was_saved_as_numbers(tmp_path: Path) -> None:
    first = torch.amp.GradScaler("cpu", init_scale=4.0)
    opened = saved(tmp_path, first)  # not begun: it has no tensors yet
    second = torch.amp.GradScaler("cpu")
    restore({"extra.scaler": second}, [opened], rank=0)
    assert second.state_dict() == first.state_dict()


def test_a_gradient_scaler_that_is_off_is_saved_too(tmp_path: Path) -> None:
    off = torch.amp.GradScaler("cpu", enabled=False)
    restore({"extra.scaler": off}, [saved(tmp_path, off)], rank=0)
