"""Optimizers: torch's, and those that users bring."""

from __future__ import annotations

from typing import Any

import torch

from bench.checkpoint.battery.frame import Run, kind, loop, net

TORCH: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
}


@kind("optimizer", options=tuple(TORCH))
def of_torch(run: Run) -> Any:
    model = net()
    return loop(run, model, TORCH[run.option](model.parameters()))
