"""Training loops of ``bench.checkpoint.loops``: what they train, one step of it, and its state."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchdata.stateful_dataloader as stateful
from torch import nn

from bench.checkpoint.loops.case import Loop
from robust_slurm import Checkpointer

BATCH = 4
SCALE = 0.98
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that depend on their number alone."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 5 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(self.width) * (index + 1.0))


class Training:
    """The objects that a loop trains with, and one step of it."""

    def __init__(self, loop: Loop) -> None:
        torch.manual_seed(loop.seed)
        self.loop = loop
        self.model = _model(loop.model, loop.width)
        if loop.model == "flat":
            self.flat = _flatten(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if loop.optimizer == "two":
            half = len(trained) // 2
            parts = {"adam": trained[:half], "sgd": trained[half:]}
            self.optimizers = [OPTIMIZERS[kind](part) for kind, part in parts.items()]
        else:
            self.optimizers = [OPTIMIZERS[loop.optimizer](trained)]
        self.trained = trained
        self.ema = torch.optim.swa_utils.AveragedModel(self.model) if loop.ema != "off" else None
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(each, 2, 0.7)
            for each in (self.optimizers if loop.scheduler != "off" else ())
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if loop.scaler else None
        self.generator = torch.Generator().manual_seed(loop.seed)
        self.loader = stateful.StatefulDataLoader(
            Samples(loop.width), BATCH, shuffle=True, num_workers=2 if loop.data == "workers" else 0
        )
        self.batches: Iterator[torch.Tensor] = iter(())
        self.tokens = 0
        self.checkpointer: Checkpointer | None = None
        self._steps: list[Callable[[], object]] = [each.step for each in self.optimizers]
        if loop.update == "compiled":
            self._steps = [torch.compile(each, backend="eager") for each in self._steps]

    def extra(self) -> dict[str, Any]:
        """Return the objects that the script gives to save besides."""
        given: dict[str, Any] = {"generator": self.generator}
        if self.loop.scheduler not in ("off", "not given"):
            given |= {f"scheduler{i}": each for i, each in enumerate(self.schedulers)}
        if self.ema is not None:
            given["ema"] = self.ema
        if self.scaler is not None:
            given["scaler"] = self.scaler
        if self.loop.counter != "off":
            given["tokens"] = 0
        return given

    def batch(self) -> torch.Tensor:
        """The next one."""
        if self.loop.data == "global":
            return torch.randn(BATCH, self.loop.width)
        if self.loop.data == "generator":
            return torch.randn(BATCH, self.loop.width, generator=self.generator)
        while True:  # a loader that is restored at the end of a pass has no more batches in it
            for batch in self.batches:
                return batch
            self.batches = iter(self.loader)

    def backward(self, number: int, micro: int) -> None:
        """Forward and backward of one micro-batch."""
        x = self.batch()
        loss = (self.model(x) - x).square().mean() / self.loop.accumulate
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
            if number % 4 == 3 and micro == 0:
                loss = loss * float("inf")
        loss.backward()

    def update(self) -> None:
        """The optimizer's step, with gradients."""
        nn.utils.clip_grad_norm_(self.trained, 1.0) if self.scaler is None else None
        if self.loop.update == "unseen":
            for p in self.trained:
                if p.grad is not None and bool(torch.isfinite(p.grad).all()):
                    p.detach().numpy()[...] -= 0.1 * p.grad.numpy()
        elif self.scaler is not None:
            for each in self.optimizers:
                self.scaler.step(each)
            self.scaler.update()
        else:
            for step in self._steps:
                step()
        for each in self.optimizers:
            each.zero_grad()

    def scale_weights(self) -> None:
        """Weight decay as some scripts do it: outside the optimizer."""
        for p in self.trained:
            if self.loop.writes == "data":
                p.data.mul_(SCALE)
            elif self.loop.writes == "numpy":
                p.detach().numpy()[...] *= SCALE
            else:
                with torch.no_grad():
                    p.mul_(SCALE)

    def evaluate(self) -> None:
        """With other weights, for a moment."""
        kept = [p.detach().clone() for p in self.trained]
        for of in ([k * 0.5 for k in kept], kept):
            for p, new in zip(self.trained, of, strict=True):
                if self.loop.swap == "data":
                    p.data.copy_(new)
                elif self.loop.swap == "numpy":
                    p.detach().numpy()[...] = new.numpy()
                else:
                    with torch.no_grad():
                        p.copy_(new)
            time.sleep(0.002)  # the evaluation

    def count(self) -> None:
        """Plain Python state of the script."""
        self.tokens += BATCH
        if self.checkpointer is not None and "tokens" in self.checkpointer.extra:
            self.checkpointer.extra["tokens"] = self.tokens

    def tail(self, number: int, when: str) -> None:
        """Do the script's work of once a step, ``when`` before or after save()."""
        loop = self.loop
        if loop.scheduler == when or (loop.scheduler == "not given" and when == "before save"):
            for each in self.schedulers:
                each.step()
        if loop.ema == when and self.ema is not None:
            self.ema.update_parameters(self.model)
        if loop.counter == when:
            self.count()
        if loop.writes != "off" and loop.writes_at == when and number >= loop.since:
            self.scale_weights()
        if loop.swap != "off" and when == "after save" and number >= loop.since:
            self.evaluate()
        if loop.partial != "off" and loop.partial_at == when and number >= loop.partial_since:
            self.partly(number)

    def partly(self, number: int) -> None:
        """Write to a few items of each weight, through ``.data``: no version counts it."""
        for p in self.trained:
            if self.loop.partial == "clamp":
                sizes = p.detach().abs().flatten().sort().values
                bound = float(sizes[len(sizes) * 99 // 100 - 1])
                p.data.clamp_(-bound, bound)
            else:
                p.data[(self.loop.seed + number) % len(p)].mul_(SCALE)

    def state(self) -> dict[str, int]:
        """crc32 of all that a training goes on from, by object."""
        tensors: dict[str, list[torch.Tensor | None]] = {
            "model": [*self.model.state_dict().values()],
            "ema": [*self.ema.state_dict().values()] if self.ema is not None else [],
            "gradients": [p.grad for p in self.trained],
            "generator": [self.generator.get_state()],
            "rng": [torch.get_rng_state()],
            "optimizer": [
                value
                for optimizer in self.optimizers
                for p in self.trained
                for _, value in sorted(optimizer.state.get(p, {}).items())
                if isinstance(value, torch.Tensor)
            ],
        }
        rates = [group["lr"] for each in self.optimizers for group in each.param_groups]
        values = {
            "scheduler": (rates, [each.state_dict() for each in self.schedulers]),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "tokens": self.tokens,
        }
        found = {name: zlib.crc32(repr(value).encode()) for name, value in values.items()}
        for name, those in tensors.items():
            for tensor in those:
                raw = b"" if tensor is None else tensor.detach().contiguous().numpy().tobytes()
                found[name] = zlib.crc32(raw + b"|", found.get(name, 0))
        return found


def _model(kind: str, width: int) -> nn.Module:
    if kind == "tied":
        return Tied(width)
    middle: dict[str, Callable[[], nn.Module]] = {
        "batchnorm": lambda: nn.BatchNorm1d(width), "dropout": lambda: nn.Dropout(0.2)
    }  # fmt: skip
    layers = [nn.Linear(width, width), middle.get(kind, nn.ReLU)(), nn.Linear(width, width)]
    model = nn.Sequential(*layers)
    if kind == "frozen":
        model[0].requires_grad_(False)
    return model


def _flatten(model: nn.Module) -> torch.Tensor:
    """Have all parameters be views of one buffer, as Megatron and apex do."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return flat
