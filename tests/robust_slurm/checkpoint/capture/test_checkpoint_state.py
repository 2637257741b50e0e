"""Capture and restore in one process: training goes on from a snapshot bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import capture, restore, scribble, source, write
from torch import nn

from robust_slurm.checkpoint.capture import assembly
from robust_slurm.checkpoint.capture.state import State

torch.set_num_threads(1)

Make = Callable[[], dict[str, Any]]


class Net(nn.Module):
    """Many kinds of tensors: tied, channels last, frozen, empty, 0-dim, all sorts of buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3))] * 2)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.column = nn.Parameter(torch.randn(5, 6)[:, 2])
        self.transposed = nn.Parameter(torch.randn(3, 6).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("bits", torch.tensor([3, -1], dtype=torch.int8))
        self.register_buffer("wave", torch.tensor([1 + 2j], dtype=torch.complex128))
        self.register_buffer("small", torch.tensor([1.5]).to(torch.float8_e4m3fnuz))
        self.register_buffer("brief", torch.randn(3).to(torch.bfloat16))
        self.register_buffer("none", None)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        seen = self.norm(self.conv(image)).mean((2, 3)).sum()
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        y = self.head(x) * self.scale + self.column.sum() + self.transposed.sum()
        self.brief.add_(1)
        return y.square().mean() + seen


def train(objects: dict[str, Any], steps: int) -> list[bytes]:
    """Losses of some steps, drawn from torch's generator, as bytes."""
    losses = []
    for _ in range(steps):
        image = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
        words = torch.randint(0, 7, (2, 3))

        def closure(image: torch.Tensor = image, words: torch.Tensor = words) -> torch.Tensor:
            objects["optimizer"].zero_grad()
            loss: torch.Tensor = objects["model"](image, words)
            loss.backward()
            return loss

        loss = objects["optimizer"].step(closure)
        losses.append(loss.detach().numpy().tobytes())
    return losses


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return False
        raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
        return raw[0].equal(raw[1])
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return type(a) is type(b) and bool(a == b)


def states_of(objects: dict[str, Any]) -> dict[str, Any]:
    found = {k: v.state_dict() for k, v in objects.items() if hasattr(v, "state_dict")}
    return copy.deepcopy(found)


def assert_goes_on_exactly(make: Make, tmp_path: Path, before: int = 3, after: int = 3) -> None:
    """New objects, restored from a file, go on as the old ones go on."""
    torch.manual_seed(5)
    first = make()
    train(first, before)
    path = write(tmp_path / "snapshot.safetensors", *capture(first, rank=0))
    then = states_of(first)
    expected = train(first, after)
    torch.manual_seed(99)
    second = make()
    train(second, 1)  # what is there already is overwritten, not only added to
    assert not same_bits(states_of(second), then)
    restore(second, [source(path)], rank=0)
    scribble(path)  # nothing may refer to the file any more
    assert same_bits(states_of(second), then)
    assert train(second, after) == expected
    assert same_bits(states_of(second), states_of(first))


def with_optimizer(make_optimizer: Callable[[list[nn.Parameter]], Any]) -> Make:
    def make() -> dict[str, Any]:
        model = Net()
        used = [p for p in model.parameters() if p.requires_grad]
        return {"model": model, "optimizer": make_optimizer(used), "rng": None}

    return make


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[::2], "weight_decay": 0.1},
        {"params": parameters[1::2], "lr": torch.tensor(0.01)},
    ]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(groups_of(p), foreach=False, capturable=False),
    "adam-amsgrad-foreach": lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(
        [q for q in p if q.is_contiguous()], lr=0.1, max_iter=4, history_size=3
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert_goes_on_exactly(with_optimizer(OPTIMIZERS[name]), tmp_path)


def test_a_snapshot_before_the_first_step_restores_too(tmp_path: Path) -> None:
    assert_goes_on_exactly(with_optimizer(torch.optim.AdamW), tmp_path, before=0)


class Odd(torch.optim.Optimizer):
    """State in types that torch's load_state_dict would cast or break."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01, "mode": "slow", "order": (1, 2)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.state["overall"] = {"steps": self.state["overall"].get("steps", 0) + 1}
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                s = self.state[p]
                s.setdefault("exact", torch.zeros(p.shape, dtype=torch.float64)).add_(p.grad / 3)
                s["count"] = s.get("count", 0) + 1
                s["said"] = f"step {s['count']}"
                s["history"] = [*s.get("history", []), p.grad.abs().sum().double()][-2:]
                s["same"] = s["history"][-1]
                p.sub_(s["exact"] * self.param_groups[0]["lr"])
        return loss


class Asking(Odd):
    """An object with methods of its own, as wrappers of optimizers do."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "state": {k: v for k, v in state["state"].items() if k != "overall"}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = True
        for part in state_dict["state"].values():
            part.pop("said")  # a string, which torch would turn into the name of a generator
            part["exact"] = part["exact"].float()  # what torch does to averages
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [Odd])
def test_odd_optimizer_state_is_exact(kind: type[Odd], tmp_path: Path) -> None:
    assert_goes_on_exactly(with_optimizer(kind), tmp_path)


def test_one_tensor_in_two_places_of_the_state_stays_one(tmp_path: Path) -> None:
    objects = with_optimizer(Odd)()
    train(objects, 2)
    path = write(tmp_path / "s", *capture(objects, rank=0))
    again = with_optimizer(Odd)()
    restore(again, [source(path)], rank=0)
    state = again["optimizer"].state[again["model"].scale]
    assert state["same"] is state["history"][-1]


def test_sixteen_bit_parameters_keep_averages_of_thirty_two(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(3, 3).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer}

    first = make()
    weight = first["model"].weight
    first["optimizer"].state[weight]["master"] = torch.randn(3, 3)
    path = write(tmp_path / "s", *capture(first, rank=0))
    second = make()
    restore(second, [source(path)], rank=0)
    master = second["optimizer"].state[second["model"].weight]["master"]
    assert master.dtype == torch.float32
    assert master.equal(first["optimizer"].state[weight]["master"])


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        models = {"gen": nn.Linear(2, 3), "critic": nn.Linear(3, 1)}
        optimizers = [torch.optim.AdamW(m.parameters()) for m in models.values()]
        return {"model": models, "optimizer": optimizers}

    first, second = make(), make()
    for model, optimizer in zip(first["model"].values(), first["optimizer"], strict=True):
        model(torch.ones(1, model.in_features)).sum().backward()
        optimizer.step()
    items, values = capture(first, rank=0)
    names = {item.entry.fqn for item in items}
    assert {"model.gen.weight", "optimizer.1.state.critic.weight.exp_avg"} <= names
    restore(second, [source(write(tmp_path / "s", items, values))], rank=0)
    for here, there in zip(first["optimizer"], second["optimizer"], strict=True):
        assert same_bits(here.state_dict(), there.state_dict())
    assert same_bits(
        {k: dict(m.state_dict()) for k, m in first["model"].items()},
        {k: dict(m.state_dict()) for k, m in second["model"].items()},
    )


def test_tied_parameters_are_saved_once() -> None:
    items, _ = capture({"model": Net()}, rank=0)
    names = [item.entry.fqn for item in items]
    assert "model.embed.weight" in names
    assert "model.head.weight" not in names
    assert "model.layers.1.0.weight" not in names
    assert len(set(names)) == len(names)
    assert "model.scratch" not in names


def test_only_what_the_step_alone_changes_may_be_copied_late() -> None:
    objects = with_optimizer(OPTIMIZERS["adamw"])()
    train(objects, 1)
    items, _ = capture({**objects, "extra.ema": nn.Linear(2, 2)}, rank=0)
    late = {item.entry.fqn: item.late for item in items}
    assert late["model.scale"] and late["optimizer.state.scale.exp_avg"]
    assert not late["model.norm.running_mean"]
    assert not late["optimizer.param_groups.1.lr"]  # a scheduler sets it
    assert not late["extra.ema.weight"] and not late["rng.torch"]


def test_versions_of_items_tell_of_changes() -> None:
    model = nn.Linear(2, 2)
    items, _ = capture({"model": model}, rank=0)
    before = [item.tensor._version for item in items]
    with torch.no_grad():
        model.weight.add_(1)
    after = [item.tensor._version for item in items]
    assert [a - b for a, b in zip(after, before, strict=True)] == [1, 0]


@pytest.mark.slow
def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    path = write(tmp_path / "s", *capture({"model": plain}, rank=0))
    inner = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))))
    wrapped = torch.compile(inner)
    items, _ = capture({"model": wrapped}, rank=0)
    assert [i.entry.fqn for i in items] == [f"model.{name}" for name in plain.state_dict()]
    restore({"model": wrapped}, [source(path)], rank=0)
    assert inner[1]._checkpoint_wrapped_module[0].weight.equal(plain[1][0].weight)


class WithExtra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: dict[str, Any] = {"n": 0, "t": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_extra_state_of_modules(tmp_path: Path) -> None:
    first, second = WithExtra(), WithExtra()
    first.seen = {"n": 4, "t": torch.tensor([1.0, 2.0])}
    path = write(tmp_path / "s", *capture({"model": first}, rank=0))
    restore({"model": second}, [source(path)], rank=0)
    scribble(path)
    assert same_bits(second.seen, first.seen)


class Hooked(nn.Linear):
    """A module whose state_dict() says something else than its tensors."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "double"] = destination.pop(prefix + "weight") * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "double") / 2
        super()._load_from_state_dict(state, prefix, *rest)


def test_modules_with_methods_of_their_own_are_asked(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.DataParallel(nn.Sequential(Hooked(2, 2), nn.BatchNorm1d(2)))

    first = make()
    state = State({"model": first}, rank=0)
    state.capture()
    with torch.no_grad():
        first.module[0].weight.add_(1)
    items, values = state.capture()
    assert {"model.0.double", "model.0.bias", "model.1.running_var"} <= {
        item.entry.fqn for item in items
    }
    second = make()
    restore({"model": second}, [source(write(tmp_path / "s", items, values))], rank=0)
    assert second.module[0].weight.equal(first.module[0].weight)


def test_an_optimizer_with_methods_of_its_own_is_asked_and_put_right(tmp_path: Path) -> None:
    make = with_optimizer(Asking)
    first, second = make(), make()
    train(first, 2)
    path = write(tmp_path / "s", *capture(first, rank=0))
    restore(second, [source(path)], rank=0)
    scribble(path)
    assert second["optimizer"].loaded
    for name, parameter in second["model"].named_parameters():
        state = second["optimizer"].state.get(parameter, {})
        if state:
            there = first["optimizer"].state[first["model"].get_parameter(name)]
            assert state["exact"].dtype == torch.float64
            assert state["exact"].equal(there["exact"])


def test_tensors_of_the_live_state_stay_the_same_objects(tmp_path: Path) -> None:
    objects = with_optimizer(torch.optim.AdamW)()
    train(objects, 1)
    path = write(tmp_path / "s", *capture(objects, rank=0))
    parameter = objects["model"].scale
    average = objects["optimizer"].state[parameter]["exp_avg"]
    train(objects, 1)
    restore(objects, [source(path)], rank=0)
    assert objects["optimizer"].state[parameter]["exp_avg"] is average
    assert objects["model"].scale is parameter


def test_much_is_copied_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "PER_THREAD", 64)
    monkeypatch.setattr(assembly.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert_goes_on_exactly(with_optimizer(OPTIMIZERS["adamw"]), tmp_path)


def test_large_tensors_that_are_made_anew_are_exact(tmp_path: Path) -> None:
    """Large enough for huge pages to be asked for."""
    model = nn.Linear(1100, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, 1100)).square().sum().backward()
    optimizer.step()
    path = write(tmp_path / "s", *capture({"model": model, "optimizer": optimizer}, rank=0))
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    restore({"model": model, "optimizer": fresh}, [source(path)], rank=0)
    scribble(path)
    assert same_bits(fresh.state_dict(), optimizer.state_dict())
