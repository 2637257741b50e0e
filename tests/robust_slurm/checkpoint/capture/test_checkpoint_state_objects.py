"""Generators, loaders, schedulers; and what a snapshot that does not fit says."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_files import capture, restore, source, write
from torch import nn
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from robust_slurm.checkpoint.capture.state import OpenedSnapshot, State, StateError


def saved(tmp_path: Path, objects: dict[str, Any]) -> OpenedSnapshot:
    return source(write(tmp_path / "s.safetensors", *capture(objects, rank=0)))


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        numpy.random.random(3).tolist(),
        float(numpy.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.randperm(5).tolist(),
        torch.randn(1).tolist(),
    ]


def test_generators_of_the_process_go_on(tmp_path: Path) -> None:
    random.gauss(0, 1)  # keeps a second number for the next call
    numpy.random.standard_normal()
    torch.randn(1)
    opened = saved(tmp_path, {"rng": None})
    expected = draws()
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    restore({"rng": None}, [opened], rank=0)
    assert draws() == expected


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: random.Random(3), lambda g: [g.random(), g.gauss(0, 1)]),
        (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(4, generator=g).tolist()),
        (lambda: numpy.random.default_rng(3), lambda g: g.random(4).tolist()),
        (
            lambda: numpy.random.Generator(numpy.random.MT19937(3)),
            lambda g: g.standard_normal(3).tolist(),
        ),
        (lambda: numpy.random.RandomState(3), lambda g: g.standard_normal(3).tolist()),
    ],
    ids=["random", "torch", "numpy", "numpy-mt", "numpy-old"],
)
def test_generators_of_the_script_go_on_in_place(
    make: Callable[[], Any], draw: Callable[[Any], Any], tmp_path: Path
) -> None:
    first, second = make(), make()
    draw(first)
    opened = saved(tmp_path, {"extra.order": first})
    restore({"extra.order": second}, [opened], rank=0)
    assert draw(second) == draw(first)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor([float(at)])

    def __len__(self) -> int:
        return 10


class Stream(torch.utils.data.IterableDataset[int]):
    """Each worker gives its own numbers, and knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        base = 0 if info is None else 100 * info.id
        while self.at < 6:
            self.at += 1
            yield base + self.at
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "where": torch.tensor([self.at]), "pair": (self.at, None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["pair"] == (state["at"], None) and int(state["where"]) == state["at"]
        self.at = state["at"]


def loader(kind: str, workers: int) -> StatefulDataLoader[Any]:
    if kind == "stream":
        return StatefulDataLoader(Stream(), batch_size=2, num_workers=workers)
    return StatefulDataLoader(Samples(), batch_size=3, shuffle=True, num_workers=workers)


def run(objects: dict[str, Any], steps: int, batches: Any = None) -> tuple[list[Any], Any]:
    """Return the values that some steps see, over ends of epochs, with a draw of torch's each."""
    seen = []
    for _ in range(steps):
        while True:
            if batches is None:
                batches = iter(objects["loader"])
            try:
                batch = next(batches)
                break
            except StopIteration:
                batches = None
        seen.append((torch.as_tensor(batch).flatten().tolist(), float(torch.rand(()))))
    return seen, batches


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shuffled", "stream"])
@pytest.mark.parametrize(
    ("workers", "stops"), [(0, range(7)), (2, (1, 4))], ids=["in-process", "two-workers"]
)
def test_a_loader_goes_on_with_the_next_sample(
    kind: str, workers: int, stops: Any, tmp_path: Path
) -> None:
    """Later draws of torch's generator are the same: making an iterator must not cost one more."""
    for stop in stops:
        torch.manual_seed(3)
        first = {"loader": loader(kind, workers), "rng": None}
        _, batches = run(first, stop)
        if stop == 0:
            batches = iter(first["loader"])
        opened = saved(tmp_path, first)
        expected, _ = run(first, 6, batches)
        del first, batches
        torch.manual_seed(44)
        second = {"loader": loader(kind, workers), "rng": None}
        restore(second, [opened], rank=0)
        assert run(second, 6)[0] == expected, stop


def test_a_sampler_is_told_its_epoch_after_the_restore(tmp_path: Path) -> None:
    def make() -> tuple[Any, dict[str, Any]]:
        sampler: Any = torch.utils.data.DistributedSampler(Samples(), num_replicas=1, rank=0)
        found = StatefulDataLoader(Samples(), batch_size=2, sampler=sampler)
        return sampler, {"loader": found, "rng": None}

    sampler, first = make()
    sampler.set_epoch(3)
    batches = iter(first["loader"])
    for _ in range(2):
        next(batches)
    opened = saved(tmp_path, first)
    expected = [batch.flatten().tolist() for batch in batches], float(torch.rand(()))
    sampler, second = make()
    restore(second, [opened], rank=0)
    sampler.set_epoch(3)
    rest = [batch.flatten().tolist() for batch in second["loader"]]
    assert (rest, float(torch.rand(()))) == expected


def test_several_loaders(tmp_path: Path) -> None:
    first, second = ([loader("stream", 0), loader("stream", 0)] for _ in range(2))
    next(iter(first[1]))
    restore({"loader": second}, [saved(tmp_path, {"loader": first})], rank=0)
    assert [next(iter(part)).tolist() for part in second] == [[1, 2], [3, 4]]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, step_size_up=3),
    "cosine-restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o)]
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_go_on(name: str, tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {
            "model": model,
            "optimizer": optimizer,
            "extra.schedule": SCHEDULERS[name](optimizer),
        }

    def rates(objects: dict[str, Any], steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            objects["model"](torch.ones(1, 1)).sum().backward()
            objects["optimizer"].step()
            schedule = objects["extra.schedule"]
            schedule.step(*([1.0] if name == "plateau" else []))
            found.append(objects["optimizer"].param_groups[0]["lr"])
        return found

    first, second = make(), make()
    rates(first, 2)
    opened = saved(tmp_path, first)
    restore(second, [opened], rank=0)
    assert rates(second, 5) == rates(first, 5)


def linear(*shape: int, **options: Any) -> dict[str, Any]:
    model = nn.Linear(*shape, **options)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def two_groups() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    groups = [{"params": [p]} for p in model.parameters()]
    return {"model": model, "optimizer": torch.optim.AdamW(groups)}


def one_parameter_less() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.AdamW([model.weight])}


@pytest.mark.parametrize(
    ("live", "says"),
    [
        (lambda: linear(3, 2), r"model\.weight: saved with shape \[2, 2\], it has \[2, 3\] here"),
        (lambda: linear(2, 2, bias=False), "model: only the snapshot has bias"),
        (
            lambda: {"model": nn.Sequential(nn.Linear(2, 2)), "optimizer": None},
            "optimizer: a NoneType has no state_dict",
        ),
        (
            lambda: {**linear(2, 2), "model": nn.Sequential(nn.Linear(2, 2))},
            r"model: the snapshot lacks 0\.weight, 0\.bias; only the snapshot has weight, bias",
        ),
        (lambda: linear(2, 2, dtype=torch.float64), r"model\.weight: saved as torch\.float32, it"),
        (two_groups, "optimizer: saved with 1 parameter group, it has 2"),
        (one_parameter_less, "group 0 was saved with 2 parameters, it has 1.*snapshot: bias"),
        (lambda: {**linear(2, 2), "extra.x": Stream()}, r"state: the snapshot lacks extra\.x"),
        (lambda: {"model": nn.Linear(2, 2)}, "state: only the snapshot has optimizer"),
        (lambda: {**linear(2, 2), "model": [nn.Linear(2, 2)]}, "model: 1 objects here"),
    ],
)
def test_a_snapshot_that_does_not_fit_is_refused_before_anything_changes(
    live: Callable[[], dict[str, Any]], says: str, tmp_path: Path
) -> None:
    opened = saved(tmp_path, linear(2, 2))
    with pytest.raises((StateError, TypeError), match=says):
        objects = live()
        before = {k: str(v.state_dict()) for k, v in objects.items() if hasattr(v, "state_dict")}
        try:
            restore(objects, [opened], rank=0)
        finally:
            for key, state in before.items():
                assert str(objects[key].state_dict()) == state


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    class Strict:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            state["b"]

    opened = saved(tmp_path, {"extra.strict": Strict()})
    with pytest.raises(StateError, match=r"extra\.strict: Strict does not take.*KeyError: 'b'"):
        restore({"extra.strict": Strict()}, [opened], rank=0)


def test_values_from_elsewhere_are_no_state(tmp_path: Path) -> None:
    opened = saved(tmp_path, {"model": nn.Linear(1, 1)})
    for values in (None, {"model": 1}, {"model": {"d": 1}}, {"model": {"d": {"weight": 1}}}):
        broken = OpenedSnapshot(opened.snapshot._replace(values=values), opened.tensors)
        with pytest.raises(StateError):
            restore({"model": nn.Linear(1, 1)}, [broken], rank=0)
    with pytest.raises(StateError, match=r"none of the snapshots given \(1\) is of rank 3"):
        restore({"model": nn.Linear(1, 1)}, [opened], rank=3)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (nn.LazyLinear(3), r"model\.weight: .*no shape yet"),
        (nn.Linear(2, 2, device="meta"), r"model\.weight: .*meta device"),
        (nn.Embedding.from_pretrained(torch.eye(2).to_sparse()), r"model\.weight: .*layout"),
    ],
)
def test_tensors_without_plain_data_are_refused_by_name(found: nn.Module, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        State({"model": found}, rank=0).capture()


def optimized(make: Callable[..., Any], **options: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = make(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("before", "now", "lacking"),
    [
        (torch.optim.Adam, torch.optim.SGD, "dampening"),
        (torch.optim.SGD, torch.optim.AdamW, "betas"),
        (torch.optim.NAdam, torch.optim.Adam, "amsgrad"),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused(
    before: Any, now: Any, lacking: str, tmp_path: Path
) -> None:
    opened = saved(tmp_path, optimized(before))
    objects = optimized(now)
    kept = objects["model"].weight.detach().clone()
    text = f"optimizer: saved from {before.__name__}, it is {now.__name__}.*{lacking}"
    with pytest.raises(StateError, match=text):
        restore(objects, [opened], rank=0)
    assert objects["model"].weight.equal(kept)


def test_an_optimizer_of_the_same_settings_is_taken_and_that_is_said(tmp_path: Path) -> None:
    class Mine(torch.optim.Adam):
        pass

    opened = saved(tmp_path, optimized(torch.optim.Adam))
    objects = optimized(Mine)
    state = State(objects, rank=0)
    state.restore([opened])
    assert state.notes == ["optimizer: the state of Adam is taken for Mine"]
    same = State(optimized(torch.optim.Adam), rank=0)
    same.restore([opened])
    assert same.notes == []
