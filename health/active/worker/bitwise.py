"""Small models trained for a few steps from fixed numbers: the same bits on every machine.

Imports torch. The work is a language model's: attention, layers of products, normalisation, a
loss over classes, and in "moe" experts chosen by a router; forward, backward and SGD. On a GPU
products are in bf16, all else in fp32. Nothing is drawn by chance and every operator that is used
is deterministic; a digest's key names all that may rightly change the bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from health.active.worker.bits import digest, environment
from health.active.worker.device import (
    MOST_WRONG,
    WorkerDevice,
    fractions,
    hashed,
    on_each,
    use_all_cores,
)
from health.active_tests import Level, Measured

RECIPE = 1  # to be raised with every change of what is calculated here
MODELS = ("dense", "moe")
STEPS: dict[Level, int] = {"quick": 4, "standard": 16, "long": 64}
LEAST_RUNS = 2  # of one model: a device must at least agree with itself
RATE = 2.0**-4


class Size(NamedTuple):
    """Widths of a model. ``rows`` sequences of ``length`` tokens are a batch."""

    width: int
    heads: int
    layers: int
    hidden: int
    classes: int
    rows: int
    length: int
    experts: int = 4
    chosen: int = 2


CPU = Size(64, 4, 2, 256, 128, 4, 32)
GPU = Size(512, 8, 4, 2048, 1024, 8, 256)


class Trained(NamedTuple):
    """The result of a training run: losses, and a digest of losses, last gradients and weights."""

    losses: tuple[float, ...]
    digest: str


def run(
    devices: Sequence[WorkerDevice], models: Sequence[str], steps: int, seconds: float, seed: int
) -> list[Measured]:
    """Every model at least twice on each device, and again as long as there are ``seconds``."""
    with _deterministic(cuda=devices[0].cuda):
        work = partial(_one, models=models, steps=steps, seconds=seconds, seed=seed)
        return on_each("bitwise", devices, work)


@contextmanager
def _deterministic(cuda: bool) -> Iterator[None]:
    """The whole process: operators that give the same bits, and on the CPU one thread.

    Not by torch.use_deterministic_algorithms: that imports torch's compiler, for seconds.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    if not cuda:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        if not cuda:
            use_all_cores()


def _one(
    device: WorkerDevice, models: Sequence[str], steps: int, seconds: float, seed: int
) -> Measured:
    digests: dict[str, str] = {}
    wrong: list[str] = []
    until = time.monotonic()
    for name in models:
        until += seconds / len(models)
        first = train(device, name, steps, seed)
        runs, said = 1, _not_finite(name, first)
        while not said and (runs < LEAST_RUNS or time.monotonic() < until):
            runs += 1
            said = _differs(name, first, train(device, name, steps, seed), runs)
        wrong += said
        if not said:  # else there is no digest that this device gives
            digests[key(device, name, steps, seed)] = first.digest
    return Measured("bitwise", "", digests=digests, wrong=tuple(wrong[:MOST_WRONG]))


def _not_finite(name: str, got: Trained) -> list[str]:
    for step, loss in enumerate(got.losses):
        if not math.isfinite(loss):
            return [
                f"{name} model: the loss of step {step} is {loss}, which no healthy device produces"
            ]
    return []


def _differs(name: str, first: Trained, other: Trained, runs: int) -> list[str]:
    if first.digest == other.digest:
        return []
    for step, (a, b) in enumerate(zip(first.losses, other.losses, strict=True)):
        if a != b:
            where = f"from step {step} on: its loss was {a!r}, then {b!r}"
            return [f"{name} model: run 1 and run {runs} of the same work differ {where}"]
    return [f"{name} model: run 1 and run {runs} of the same work differ in gradients or weights"]


def key(device: WorkerDevice, name: str, steps: int, seed: int) -> str:
    """Return a digest's key: "dense/MODEL/CAPABILITY/TORCH/LIBRARIES/STEPS/SEED/RECIPE"."""
    return "/".join((name, *environment(device), str(steps), str(seed), f"r{RECIPE}"))


def train(device: WorkerDevice, name: str, steps: int, seed: int) -> Trained:
    """Train the model from its fixed beginning."""
    size = GPU if device.cuda else CPU
    model = Model(size, name == "moe", seed, device)
    losses: list[torch.Tensor] = []
    for step in range(steps):
        loss = model.loss(*_batch(size, seed * 1000 + step, device.torch))
        gradients = torch.autograd.grad(loss, model.weights)
        with torch.no_grad():
            for weight, gradient in zip(model.weights, gradients, strict=True):
                weight.sub_(RATE * gradient)
        losses.append(loss.detach())
    return Trained(tuple(map(float, losses)), digest((*losses, *gradients, *model.weights)))


def _batch(size: Size, seed: int, at: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (tokens x width), and the class that each token should give, as 0 and 1."""
    tokens = size.rows * size.length
    inputs = fractions(seed, tokens * size.width, 7, at).view(tokens, size.width)
    classes = hashed(seed, tokens, at).bitwise_and_(size.classes - 1)
    every = torch.arange(size.classes, device=at)
    return inputs, (classes[:, None] == every).to(torch.float32)


class Model:
    """The weights, made in the order of their use, and the way from inputs to the loss."""

    def __init__(self, size: Size, moe: bool, seed: int, device: WorkerDevice) -> None:
        self.size = size
        self.moe = moe
        self.weights: list[torch.Tensor] = []
        self._dtype = torch.bfloat16 if device.cuda else torch.float32
        experts = size.experts if moe else 1
        for _ in range(size.layers):
            shapes = [(size.width, 3 * size.width), (size.width, size.width)]
            if moe:
                shapes.append((size.width, experts))
            shapes += [(size.width, size.hidden), (size.hidden, size.width)] * experts
            for shape in shapes:
                self._make(shape, seed, device.torch)
        self._make((size.width, size.classes), seed, device.torch)

    def _make(self, shape: tuple[int, int], seed: int, at: torch.device) -> None:
        values = fractions(seed * 1000 + 999 - len(self.weights), shape[0] * shape[1], 16, at)
        # A power of two near 1/sqrt(inputs), so that the fractions stay exact.
        values.mul_(2.0 ** -round(math.log2(shape[0]) / 2))
        self.weights.append(values.view(shape).requires_grad_())

    def loss(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Cross entropy, the mean over tokens."""
        weights = iter(self.weights)
        for _ in range(self.size.layers):
            x = x + self._attend(_normal(x), next(weights), next(weights))
            x = x + (self._experts if self.moe else self._dense)(_normal(x), weights)
        scores = self._product(_normal(x), next(weights))
        return -(wanted * torch.log_softmax(scores, 1)).sum() / len(x)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.to(self._dtype) @ weight.to(self._dtype)).to(torch.float32)

    def _attend(self, x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
        """Each token looks at those before it, in its own sequence."""
        size = self.size
        parts = self._product(x, inner).view(size.rows, size.length, 3, size.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = self._product(query, key.transpose(2, 3)) / math.sqrt(query.shape[-1])
        place = torch.arange(size.length, device=x.device)
        scores = scores.masked_fill(place[:, None] < place, -math.inf)
        seen = self._product(torch.softmax(scores, 3), value)
        return self._product(seen.transpose(1, 2).reshape(len(x), -1), outer)

    def _dense(self, x: torch.Tensor, weights: Iterator[torch.Tensor]) -> torch.Tensor:
        inner = self._product(x, next(weights))
        return self._product(inner * torch.sigmoid(inner), next(weights))

    def _experts(self, x: torch.Tensor, weights: Iterator[torch.Tensor]) -> torch.Tensor:
        """Each token goes to the experts that the router scores highest, and to no other."""
        scores = torch.softmax(self._product(x, next(weights)), 1)
        order = torch.sort(scores.detach(), dim=1, descending=True, stable=True).indices
        chosen = order[:, : self.size.chosen]
        out = torch.zeros_like(x)
        for expert in range(self.size.experts):
            tokens = (chosen == expert).any(1).nonzero().flatten()
            gate = scores[:, expert : expert + 1].index_select(0, tokens)
            answer = self._dense(x.index_select(0, tokens), weights)
            out = out.index_add(0, tokens, gate * answer)
        return out


def _normal(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 2.0**-20)
