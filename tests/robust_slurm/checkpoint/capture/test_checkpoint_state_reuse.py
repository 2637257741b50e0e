"""Objects that capture gives again, and those that must not be taken for the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from robust_slurm.checkpoint.capture.state import Share, State

RNG_STATE = "rng.torch"


def objects() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "rng": None}


@pytest.mark.parametrize("share", [None, Share((0, 1))], ids=["alone", "shared"])
def test_the_list_is_the_same_object_while_nothing_changes(share: Share | None) -> None:
    found = objects()
    state = State(found, rank=0, share=share)
    first, _ = state.capture()
    torch.rand(1)
    found["optimizer"].step()
    assert state.capture()[0] is first
    found["model"][1].running_mean = torch.ones(3)
    second, _ = state.capture()
    assert second is not first
    assert state.capture()[0] is second
    state.unshare()
    assert {item.entry.kind for item in state.capture()[0]} == {"private"}


def test_the_state_of_a_generator_is_the_one_of_its_step() -> None:
    state = State({"rng": None}, rank=0)
    for _ in range(3):
        items, _ = state.capture()
        (saved,) = [item.tensor for item in items if item.entry.name == RNG_STATE]
        assert torch.equal(saved, torch.get_rng_state())
        torch.rand(1)


@pytest.mark.parametrize("name", ["weight", "running_mean"])
def test_the_same_bytes_as_another_type_are_another_tensor(name: str) -> None:
    found = objects()
    state = State(found, rank=0)
    state.capture()
    tensor = getattr(found["model"][1], name)
    tensor.data = tensor.data.view(torch.bfloat16)
    (item,) = [i for i in state.capture()[0] if i.entry.name == f"model.1.{name}"]
    assert (item.entry.dtype, item.tensor.dtype) == ("BF16", torch.bfloat16)


def test_a_complex_parameter_that_becomes_its_conjugate_is_seen() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor([1 + 2j]))
    state = State({"model": model}, rank=0)
    state.capture()
    model.weight.data = model.weight.data.conj()
    (item,) = state.capture()[0]
    assert item.tensor.tolist() == [1 - 2j]
