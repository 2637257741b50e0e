"""Optimizers as scripts write them: resumed to the bit and without a word, or named."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed_training import fake_store
from fake_checkpoint_store import FakeStore
from odd_scripts import SAVED, Script, crash_and_resume, same
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from robust_slurm import CheckpointError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Counting(SGD):
    """Its rate depends on a count that only its own state_dict() has."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.param_groups[0]["lr"] = 1 / self.count
        super().step()


class InTorchsNames(SGD):
    """Counts in attributes that torch has names for, too."""

    _step_count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._step_count += 1
        self.defaults["lr"] *= 0.8
        self.param_groups[0]["lr"] = self.defaults["lr"] / self._step_count
        super().step()


class OwnStateDict(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count, "hist": [torch.ones(2) * self.count]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert float(state["hist"][0][0]) == self.count
        super().load_state_dict({k: state[k] for k in ("state", "param_groups")})


class Lookahead(Optimizer):
    """A wrapper that never calls Optimizer.__init__."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = defaultdict(dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1
        with torch.no_grad():
            for p in parameters_of(self):
                slow = self.state[p].setdefault("slow", p.clone())
                if self.count % 3 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()


class LookaheadWithState(Lookahead):
    def state_dict(self) -> dict[str, Any]:
        slow = [self.state[p].get("slow") for p in parameters_of(self)]
        return {"fast": self.optimizer.state_dict(), "slow": slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["fast"])
        self.count = state["count"]
        for p, slow in zip(parameters_of(self), state["slow"], strict=True):
            self.state[p]["slow"] = slow


class Sam(Optimizer):
    """Holds another optimizer, whose state is in no state_dict()."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def move(self, by: float) -> None:
        with torch.no_grad():
            for p in parameters_of(self):
                p.add_(p.grad, alpha=by)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.move(0.05)
        self.move(-0.05)
        self.base_optimizer.step()


class Kept:
    """A plain object of the script's."""

    def __init__(self) -> None:
        self.rate, self.past = 0.1, [torch.ones(1)]


class InAttributes(Optimizer):
    """Keeps everything in attributes."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})
        self.model, self.average = model, copy.deepcopy(model)
        self.masters = {p: p.detach().double() for p in parameters_of(self)}
        self.moments: list[torch.Tensor] = []
        self.noise = torch.Generator().manual_seed(3)
        self.kept = Kept()
        self.rank = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.kept.rate *= 0.9
            self.kept.past[0].add_(self.kept.rate)
            gradients = [p.grad.double() for p in parameters_of(self)]
            old = self.moments or [torch.zeros_like(g) for g in gradients]
            self.moments = [0.9 * m + g for m, g in zip(old, gradients, strict=True)]
            for (p, master), m in zip(self.masters.items(), self.moments, strict=True):
                noise = torch.randn(p.shape, generator=self.noise)
                master.sub_((m + noise) * self.kept.rate / float(self.kept.past[0]))
                p.copy_(master)
            for p, mean in zip(self.model.parameters(), self.average.parameters(), strict=True):
                p.lerp_(mean.lerp_(p, 0.1), 0.1)


class Pair:
    """No optimizer itself, and its state_dict() has only one of its two."""

    def __init__(self, model: Any) -> None:
        self.both = [AdamW(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), 0.1, 0.9)]

    @property
    def param_groups(self) -> list[Any]:
        return [group for each in self.both for group in each.param_groups]

    def step(self) -> None:
        for each in self.both:
            each.step()

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.both[0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.both[0].load_state_dict(state["first"])


class Odd(Script):
    """A script with another optimizer; only its weights are compared."""

    def state(self) -> list[Any]:
        return list(self.model.state_dict().values())


def odd(kind: Any) -> type[Script]:
    class Made(Odd):
        def make(self) -> None:
            self.optimizer = kind(self.model)

    return Made


def with_hooks(model: Any) -> Optimizer:
    """torch's own hooks, which put a value into its state and take it out."""
    optimizer, box = SGD(model.parameters(), lr=1.0), {"rate": 1.0}

    def before(*_: Any) -> None:
        box["rate"] *= 0.8
        optimizer.param_groups[0]["lr"] = box["rate"]

    def after_load(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        box.update(state.pop("box"))
        return state

    optimizer.register_step_pre_hook(before)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "box": dict(box)})
    optimizer.register_load_state_dict_pre_hook(after_load)
    return optimizer


def by_name(model: Any) -> Optimizer:
    """Its hooks call the parameters by their names."""
    optimizer = AdamW(model.parameters(), lr=0.1)
    names = [name for name, _ in model.named_parameters()]

    def save(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        named = {names[i]: part for i, part in state["state"].items()}
        return {"state": named, "param_groups": [{**state["param_groups"][0], "params": names}]}

    def load(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        numbered = {names.index(name): part for name, part in state["state"].items()}
        group = {**state["param_groups"][0], "params": list(range(len(names)))}
        return {"state": numbered, "param_groups": [group]}

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)
    return optimizer


class WithSchedule(SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)
        self.schedule = CosineAnnealingLR(self, 9)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad()
        self.schedule.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda model: OwnStateDict(model.parameters(), lr=1.0),
        lambda model: Counting(model.parameters(), lr=1.0),
        lambda model: InTorchsNames(model.parameters(), lr=1.0),
        lambda model: LookaheadWithState(AdamW(model.parameters(), lr=0.1)),
        lambda model: Sam(model.parameters()),
        lambda model: WithSchedule(model.parameters()),
        with_hooks, by_name, InAttributes, Pair,
    ],
    ids=["own", "counting", "torchs", "ahead", "sam", "plan", "hooks", "names", "many", "pair"],
)  # fmt: skip
def test_it_is_resumed_to_the_bit(
    make: Any, store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    assert same(*crash_and_resume(odd(make), store))
    assert capfd.readouterr().err == ""


def test_weights_that_a_wrapper_moves_before_its_step_are_no_trouble(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    class Script(odd(lambda model: Sam(model.parameters()))):  # type: ignore[misc]
        def step(self, number: int) -> None:
            x = torch.randn(3, 6)
            for by in (0.05, -0.05):
                self.model(x).square().mean().backward()
                self.optimizer.move(by)
            self.optimizer.base_optimizer.step()
            self.optimizer.zero_grad()
            if self.ckpt is not None:
                self.ckpt.save(number)

    crash_and_resume(Script, store)
    assert capfd.readouterr().err == ""


def test_the_step_of_an_averager_goes_on(
    world: None, store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    class Script(Odd):
        def make(self) -> None:
            averager = PeriodicModelAverager(period=4, warmup_steps=2)
            inner = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.optimizer = PostLocalSGDOptimizer(inner, averager)

        def state(self) -> list[Any]:
            return [*super().state(), self.optimizer.averager.step]

    assert same(*crash_and_resume(Script, store))
    assert capfd.readouterr().err == ""


class Forgetful(AdamW):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "state": {}})


class Objects(SGD):
    """Its list of plain objects is none that can be saved."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.projectors = [Kept()]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.projectors[0].rate *= 0.9
        super().step()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Forgetful, "load_state_dict() of Forgetful does not give back what its state_dict()"),
        (Objects, "optimizer.projectors of Objects changes as it is used and cannot be saved"),
    ],
)
def test_what_is_lost_is_named(
    kind: Any, said: str, store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    crash_and_resume(odd(lambda model: kind(model.parameters())), store)
    assert said in capfd.readouterr().err


def test_a_load_state_dict_that_fails_is_named(store: FakeStore) -> None:
    class Failing(OwnStateDict):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("there is no such thing")

    with pytest.raises(CheckpointError, match="optimizer: Failing does not take its saved state"):
        crash_and_resume(odd(lambda model: Failing(model.parameters(), lr=1.0)), store)


class Compressed(Odd):
    """DDP with PowerSGD, whose errors, factors and generator are in no state_dict()."""

    warm = True
    start = 2

    def make(self) -> None:
        self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.hook = powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=self.start, min_compression_rate=0.1
        )
        self.model.register_comm_hook(self.hook, powerSGD_hook.powerSGD_hook)
        self.optimizer = SGD(self.model.parameters(), lr=0.1)
        if self.warm:  # DDP divides its gradients anew at the second forward pass
            self.model(torch.ones(1, 6)).sum().backward()
            self.model(torch.ones(1, 6))
            self.optimizer.zero_grad()

    def given(self) -> dict[str, Any]:
        return {**super().given(), "extra": {"hook": self.hook}}

    def state(self) -> list[Any]:
        return [*super().state(), self.hook.iter]


def test_the_state_of_a_communication_hook_goes_on(
    world: None, store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    assert same(*crash_and_resume(Compressed, store))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("begins", [2, SAVED], ids=["keeps errors", "keeps them from now on"])
def test_other_buckets_than_those_of_the_restored_errors_are_named(
    begins: int, world: None, store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    class Cold(Compressed):
        warm = False
        start = begins

    crash_and_resume(Cold, store)
    assert "DDP puts gradients into other buckets" in capfd.readouterr().err


class Feedback:
    """Error feedback of the script's own, from the first step on."""

    def __init__(self) -> None:
        self.error: Any = None

    def hook(self, bucket):  # type: ignore[no-untyped-def] # DDP looks at annotations
        self.error = bucket.buffer() / 2
        return (
            torch.distributed.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda found: found.value()[0])
        )


def test_buckets_that_were_about_to_change_are_named(
    world: None,
    store: FakeStore,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(Odd):
        def make(self) -> None:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
            self.model.register_comm_hook(Feedback(), Feedback.hook)
            self.optimizer = SGD(self.model.parameters(), lr=0.1)

    monkeypatch.setattr("odd_scripts.SAVED", 1)  # DDP divides its gradients anew after it
    crash_and_resume(Own, store)
    assert "DDP puts gradients into other buckets" in capfd.readouterr().err
