"""Scripts that most users would not write, and what becomes of them after a crash."""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from tempfile import TemporaryFile
from typing import Any

import numpy
import torch
from checkpointed_training import restart
from fake_checkpoint_store import FakeStore
from torch import nn
from torch.optim import lr_scheduler

from robust_slurm import Checkpointer

SAVED, STEPS = 5, 8


class Script:
    """A small training; a subclass changes what is odd about it."""

    def __init__(self, *, again: bool = False) -> None:
        """``again``: started after the crash."""
        torch.manual_seed(1)
        self.again = again
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.alone = nn.Parameter(torch.ones(3))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.kept: Any = None
        self.ckpt: Checkpointer | None = None
        self.make()

    def make(self) -> None:
        pass

    def given(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def resume(self) -> int:
        self.ckpt = Checkpointer(**self.given())
        return self.ckpt.resume()

    def step(self, number: int) -> None:
        x = torch.randn(3, 6)
        (self.model(x) - x).square().mean().mul(self.alone.exp().sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after(number)
        if self.ckpt is not None:
            self.ckpt.save(number)

    def after(self, number: int) -> None:
        pass

    def state(self) -> list[Any]:
        found = [*self.model.state_dict().values(), self.alone, self.optimizer.param_groups]
        found += [self.optimizer.state[p] for p in self.optimizer.param_groups[0]["params"]]
        return [found, self.kept]


class Temperature(Script):
    """A parameter that is in no model."""

    def make(self) -> None:
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), self.alone], lr=0.01)


class NoModel(Temperature):
    def given(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer}


class ModelInExtra(Script):
    """The optimizer's parameters are saved, under another name."""

    def given(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "extra": {"net": self.model}}


class Weights:
    """A model that is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


class NoModule(Script):
    def given(self) -> dict[str, Any]:
        return {**super().given(), "model": Weights(self.model)}


class Masters(Script):
    """The optimizer trains 32-bit copies of a 16-bit model."""

    def make(self) -> None:
        self.model.bfloat16()
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.001)

    def step(self, number: int) -> None:
        x = torch.randn(3, 6).bfloat16()
        (self.model(x) - x).square().mean().backward()
        for master, p in zip(self.masters, self.model.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters(), strict=True):
                p.copy_(master)
        if self.ckpt is not None:
            self.ckpt.save(number)


class Counts(dict[str, Any]):
    """A dict that has a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


class Own(Script):
    """Plain objects of the script's own, which it goes on with and never reads back."""

    def make(self) -> None:
        self.file = TemporaryFile()  # noqa: SIM115
        self.kept = {
            "average": {name: p.detach().clone() for name, p in self.model.named_parameters()},
            "list": [torch.zeros(2)], "losses": [], "window": deque(maxlen=3), "seen": set(),
            "best": {"at": 0}, "tensor": torch.zeros(2), "array": numpy.zeros(2),
            "pair": (torch.zeros(1), [0]), "raw": bytearray(b"0"), "parameter": self.alone,
            "mapped": numpy.memmap(self.file, shape=(2,)), "counts": Counts(n=0),
        }  # fmt: skip

    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": self.kept}

    def after(self, number: int) -> None:
        own = self.kept
        for name, p in self.model.named_parameters():
            own["average"][name].lerp_(p.detach(), 0.1)
        own["losses"].append(number)
        own["window"].append(number)
        own["seen"].add(number)
        own["raw"][:] = b"%d" % number
        own["pair"][1][0] += number
        for each in (own["list"][0], own["tensor"], own["array"], own["pair"][0], own["mapped"]):
            each += number
        own["counts"]["n"] += number
        own["best"]["at"] = number
        self.alone.data += number


class Schedulers(Script):
    """Objects in a list."""

    def make(self) -> None:
        self.schedulers = [lr_scheduler.StepLR(self.optimizer, 2)]

    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": {"schedulers": self.schedulers}}

    def after(self, number: int) -> None:
        self.schedulers[0].step()


class Conjugates(Script):
    """Two tensors whose conjugate bit is resolved into a copy are not one tensor."""

    def make(self) -> None:
        self.kept = [torch.randn(3, dtype=torch.cfloat).conj() for _ in range(2)]
        self.kept += [torch.randn(3, dtype=torch.cfloat).conj().imag for _ in range(2)]

    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": {"list": self.kept}}

    def after(self, number: int) -> None:
        for i, each in enumerate(self.kept):
            each += i * number


class ExtraState(nn.Module):
    """A module whose state changes from values to others that Python calls equal."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = 1

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class EqualValues(Script):
    def make(self) -> None:
        self.model.append(ExtraState())

    def after(self, number: int) -> None:
        values = {2: True, 3: 0.0, 4: -0.0}
        self.model[3].value = values.get(number, self.model[3].value)

    def state(self) -> list[Any]:
        return [self.model[0].weight, repr(self.model[3].value)]


class Expanded(Script):
    """A buffer whose items lie in one place."""

    def make(self) -> None:
        self.model.register_buffer("mask", torch.ones(1, 2).expand(4, 2))

    def after(self, number: int) -> None:
        self.model.mask = torch.full((1, 2), float(number)).expand(4, 2)


class Best(Script):
    """The live weights, later replaced by a copy of better ones, are not written to."""

    def weights(self) -> dict[str, Any]:
        return self.model.state_dict()

    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": {"best": self.weights()}}

    def after(self, number: int) -> None:
        if number == 3:
            self.kept = deepcopy(self.weights())
            if self.ckpt is not None:
                self.ckpt.extra["best"] = self.kept
        elif number > SAVED and self.ckpt is not None:
            self.kept = self.ckpt.extra["best"]


class BestArrays(Best):
    def weights(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}


class DefaultDevice(Script):
    """torch makes tensors on another device unless it is named (set_default_device("cuda"))."""

    def make(self) -> None:
        self.model.register_buffer("empty", torch.empty(0))

    def resume(self) -> int:
        self.ckpt = Checkpointer(**self.given())
        with torch.device("meta"):
            return self.ckpt.resume()

    def step(self, number: int) -> None:
        ckpt, self.ckpt = self.ckpt, None
        super().step(number)
        self.ckpt = ckpt
        if ckpt is not None:
            with torch.device("meta"):
                ckpt.save(number)


class Number(Script):
    """A number in extra that the script never reads back."""

    def make(self) -> None:
        self.count = 0

    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": {"count": 0, "name": "run"}}

    def after(self, number: int) -> None:
        self.count += 1
        if self.ckpt is not None:
            self.ckpt.extra["count"] = self.count


class Added(Script):
    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": {"schedule": lr_scheduler.StepLR(self.optimizer, 1)}}

    def after(self, number: int) -> None:
        if self.ckpt is not None:
            self.ckpt.extra["best"] = number
            self.ckpt.extra["schedule"] = lr_scheduler.StepLR(self.optimizer, 2)


class Unfrozen(Script):
    """The script begins to train a layer in mid-run."""

    def make(self) -> None:
        self.model[2].requires_grad_(False)

    def after(self, number: int) -> None:
        if number == 3:
            self.model[2].requires_grad_(True)


class OtherSchedule(Script):
    def given(self) -> dict[str, Any]:
        kind = lr_scheduler.ExponentialLR if self.again else lr_scheduler.StepLR
        return {**super().given(), "extra": {"schedule": kind(self.optimizer, 2)}}


def crash_and_resume(script: type[Script], store: FakeStore) -> tuple[list[Any], list[Any]]:
    """State at the end without a fault, and with one."""
    reference = script()
    for number in range(1, STEPS + 1):
        reference.step(number)
    first = script()
    began = first.resume()
    for number in range(began + 1, SAVED + 1):
        first.step(number)
    assert first.ckpt is not None
    first.ckpt._close(0.0)
    last = store.wait("saved", SAVED)[-1]
    restart(store, last["step"], last["file"])
    second = script(again=True)
    assert second.resume() == SAVED
    for number in range(SAVED + 1, STEPS + 1):
        second.step(number)
    assert second.ckpt is not None
    second.ckpt._close(0.0)
    return reference.state(), second.state()


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, in type, and in order."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor | numpy.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and repr(one) == repr(other)
