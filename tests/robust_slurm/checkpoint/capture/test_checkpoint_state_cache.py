"""Capture's memory from step to step is never out of date."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_files import capture, plain
from torch import nn

from robust_slurm.checkpoint.capture.beside.plain_values import Extra
from robust_slurm.checkpoint.capture.state import Item, Share, State


def objects() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4)))
    model[0].gain = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters()},
            {"params": [*model[1].parameters(), *model[2].parameters()]},
        ]
    )
    found = {
        "model": model,
        "optimizer": optimizer,
        "extra.schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        **plain(Extra({"note": {"deep": [1]}})),
    }
    step(found)
    return found


def step(found: dict[str, Any]) -> None:
    found["optimizer"].zero_grad()
    found["model"](torch.randn(3, 4)).square().sum().backward()
    found["optimizer"].step()
    found["extra.schedule"].step()


def contents(captured: tuple[list[Item], Any]) -> tuple[dict[str, Any], str]:
    """Return the content of a snapshot."""
    items, values = captured
    found = {
        i.entry.name: (i.entry, i.late, i.tensor.shape, i.tensor.contiguous().tolist())
        for i in items
    }
    return found, json.dumps(values, sort_keys=True)


def parameter_data(found: dict[str, Any]) -> None:
    weight = found["model"][0].weight
    weight.data = torch.full((4, 4), 7.0)


def parameter_view(found: dict[str, Any]) -> None:
    weight = found["model"][0].weight
    weight.data = weight.data.t()


def parameter_shape(found: dict[str, Any]) -> None:
    weight = found["model"][0].weight
    weight.data = weight.data.view(2, 8)


def parameter_type(found: dict[str, Any]) -> None:
    found["model"].to(torch.bfloat16)


def parameter_replaced(found: dict[str, Any]) -> None:
    found["model"][0].weight = nn.Parameter(torch.ones(4, 4))


def parameter_removed(found: dict[str, Any]) -> None:
    found["model"][0].bias = None


def parameter_renamed(found: dict[str, Any]) -> None:
    layer = found["model"][0]
    layer.gain = layer.weight
    del layer.weight


def parameters_tied(found: dict[str, Any]) -> None:
    found["model"][2][0].weight = found["model"][0].weight


def module_replaced(found: dict[str, Any]) -> None:
    found["model"][2][0] = nn.Linear(4, 4)


def module_added(found: dict[str, Any]) -> None:
    found["model"].append(nn.Linear(2, 2))


def module_renamed(found: dict[str, Any]) -> None:
    model = found["model"]
    model.add_module("last", model[2])
    del model._modules["2"]


def buffer_replaced(found: dict[str, Any]) -> None:
    found["model"][1].running_mean = torch.full((4,), 3.0)


def buffer_added(found: dict[str, Any]) -> None:
    found["model"][0].register_buffer("mask", torch.ones(2))


def buffer_not_kept(found: dict[str, Any]) -> None:
    found["model"][1]._non_persistent_buffers_set.add("running_var")


def hook_added(found: dict[str, Any]) -> None:
    def hook(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "more"] = torch.ones(1)

    found["model"][0]._register_state_dict_hook(hook)


def state_replaced(found: dict[str, Any]) -> None:
    found["optimizer"].state[found["model"][0].bias]["exp_avg"] = torch.full((4,), 9.0)


def state_added(found: dict[str, Any]) -> None:
    found["optimizer"].state[found["model"][0].bias]["more"] = torch.full((4,), 9.0)


def state_renamed(found: dict[str, Any]) -> None:
    state = found["optimizer"].state[found["model"][0].bias]
    state["other"] = state.pop("exp_avg_sq")


def state_number(found: dict[str, Any]) -> None:
    found["optimizer"].state[found["model"][0].bias]["step"] = 10**6


def state_cleared(found: dict[str, Any]) -> None:
    found["optimizer"].state.clear()


def state_moved(found: dict[str, Any]) -> None:
    state = found["optimizer"].state
    a, b = found["model"][0].bias, found["model"][2][0].bias
    state[a], state[b] = state[b], state[a]


def state_loaded(found: dict[str, Any]) -> None:
    found["optimizer"].load_state_dict(found["optimizer"].state_dict())
    found["optimizer"].state[found["model"][0].bias]["exp_avg"].fill_(2)


def state_handed_on(found: dict[str, Any]) -> None:
    state = found["optimizer"].state
    weight, bias = found["model"][0].weight, found["model"][0].bias
    last = state[weight].pop("exp_avg_sq")
    rest = dict(state[bias])
    state[bias].clear()
    state[bias].update({"exp_avg_sq": last, **rest})


def parameter_handed_on(found: dict[str, Any]) -> None:
    """The order of all parameters and names stays the same, their owner does not."""
    first, second = found["model"][0], found["model"][1]
    second._parameters = {"gain": first._parameters.pop("gain"), **second._parameters}


def group_added(found: dict[str, Any]) -> None:
    found["optimizer"].add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 3.0})


def group_moved(found: dict[str, Any]) -> None:
    groups = found["optimizer"].param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def rate_changed(found: dict[str, Any]) -> None:
    found["optimizer"].param_groups[0]["lr"] = 0.125


def schedule_steps(found: dict[str, Any]) -> None:
    found["extra.schedule"].step()


def note_changed(found: dict[str, Any]) -> None:
    found["extra.note"].state_dict()["deep"].append(2)


CHANGES: list[Callable[[dict[str, Any]], None]] = [
    step,
    parameter_data,
    parameter_view,
    parameter_shape,
    parameter_type,
    parameter_replaced,
    parameter_removed,
    parameter_renamed,
    parameters_tied,
    module_replaced,
    module_added,
    module_renamed,
    buffer_replaced,
    buffer_added,
    buffer_not_kept,
    hook_added,
    state_replaced,
    state_added,
    state_renamed,
    state_number,
    state_cleared,
    state_moved,
    state_loaded,
    state_handed_on,
    parameter_handed_on,
    group_added,
    group_moved,
    rate_changed,
    schedule_steps,
    note_changed,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("share", [None, Share((0, 1))], ids=["alone", "shared"])
def test_a_change_is_seen(change: Callable[[dict[str, Any]], None], share: Share | None) -> None:
    found = objects()
    state = State(found, rank=1, share=share)
    state.capture()
    before = contents(state.capture())
    change(found)
    for _ in range(2):
        assert contents(state.capture()) == contents(capture(found, rank=1, share=share))
    if share is None:
        assert contents(state.capture()) != before


def test_a_list_in_the_optimizer_state_may_grow() -> None:
    found = objects()
    grown = found["optimizer"].state[found["model"][0].bias]["list"] = [1]
    state = State(found, rank=0)
    for n in range(3):
        grown.append(n)
        _, values = state.capture()
        assert values["optimizer"]["d"]["state"]["d"]["0.bias"]["d"]["list"] == grown


def test_without_change_nothing_is_made_anew() -> None:
    found = objects()
    state = State(found, rank=0, share=Share((0, 1)))
    first, values = state.capture()
    step(found)
    second, more = state.capture()
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert a is b
    assert more["model"] is values["model"]
    assert more["optimizer"]["d"]["state"] is values["optimizer"]["d"]["state"]


def test_after_an_error_capture_goes_on_from_the_truth() -> None:
    found = objects()
    state = State(found, rank=0)
    before = contents(state.capture())
    bias = found["model"][0].bias
    average = found["optimizer"].state[bias]["exp_avg"]
    found["optimizer"].state[bias]["exp_avg"] = average.to_sparse()
    for _ in range(2):
        with pytest.raises(TypeError, match=r"optimizer\.state\.0\.bias\.exp_avg.*sparse"):
            state.capture()
    found["optimizer"].state[bias]["exp_avg"] = average
    assert contents(state.capture()) == before
    found["model"][0].register_buffer("edges", torch.eye(4).to_sparse())
    for _ in range(2):
        with pytest.raises(TypeError, match=r"model\.0\.edges.*sparse"):
            state.capture()
    del found["model"][0].edges
    assert contents(state.capture()) == before
    found["model"][0].weight = nn.Parameter(torch.eye(4).to_sparse())
    for _ in range(2):
        with pytest.raises(TypeError, match=r"model\.0\.weight.*sparse"):
            state.capture()
