"""From disk, outside robust-srun: the intervals, and what memory and disk treat differently."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from bench.checkpoint.battery.frame import WIDTH, Run, adamw, kind, loop, net, sgd
from bench.checkpoint.battery.kinds.loaders import LOADERS, epochs
from bench.checkpoint.battery.kinds.models import Tied
from bench.checkpoint.battery.kinds.optimizers import Masters, Muon, WithMore, half_mse, matrices


@kind(
    r"(?i)checkpoint|saved|written",
    disk="default",
    also=("warned",),
    signals=("SIGTERM", "SIGKILL"),
    variants=4,
    steps=60,
    kills=(20, 30, 40),
)
def default_interval(run: Run) -> Any:
    """The README's snippet under plain srun: a directory, and nothing else."""
    model = net()
    return loop(run, model, adamw(model))


@kind("model|optimizer|extra", disk="every", options=("muon", "masters", "more", "two"))
def optimizers_on_disk(run: Run) -> Any:
    model = net()
    if run.option == "masters":
        return loop(run, model.bfloat16(), Masters(model.parameters()), loss=half_mse)
    if run.option == "two":
        both = [sgd(model[0]), adamw(model[2])]
        return loop(run, model, both, update=lambda _: [each.step() for each in both])
    made = Muon(matrices(model)) if run.option == "muon" else WithMore(model.parameters(), 0.1)
    return loop(run, model, made)


@kind("model|extra", disk="every", options=("tied", "batchnorm", "ema", "values", "float8"))
def models_on_disk(run: Run) -> Any:
    model: Any = Tied() if run.option == "tied" else net()
    if run.option == "batchnorm":
        model.insert(1, nn.BatchNorm1d(WIDTH))
    if run.option == "float8":
        model.register_buffer("table", torch.zeros(WIDTH).to(torch.float8_e4m3fn))
    average = copy.deepcopy(model).requires_grad_(False)
    values: dict[str, Any] = {"list": [], "tensor": torch.zeros(3), "none": None}
    extra = {"ema": {"ema": average}, "values": {"values": values}}.get(run.option, {})

    @torch.no_grad()
    def after(step: int) -> None:
        values["list"].append(step)
        values["tensor"].add_(step)
        for mine, p in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(p, 0.1)

    kept = {"ema": average.state_dict, "values": lambda: values}.get(run.option, lambda: None)
    return loop(run, model, adamw(model), after=after, extra=extra, also=kept)


@kind(
    r"(?i)loader",
    disk="every",
    options=("shuffle", "2 workers"),
    steps=15,
    kills=(2, 3, 5, 7, 9, 10),
)
def loaders_on_disk(run: Run) -> Any:
    return epochs(run, LOADERS[run.option]())
