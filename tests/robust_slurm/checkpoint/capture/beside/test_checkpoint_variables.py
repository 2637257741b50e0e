"""A value that only a variable of the script goes on with is named; ``held`` hands it over."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import capture, restore, source, write
from checkpointed_training import fake_store
from fake_checkpoint_store import FakeStore

import robust_slurm
from robust_slurm import Checkpointer
from robust_slurm.checkpoint.capture.beside.variables import Variables


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


class Training:
    """Makes a Checkpointer and saves; what is odd comes from the test."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.best = 0.5

    def step(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def a_number(train: Training) -> None:
    bad = 0
    ckpt = Checkpointer(model=train.model, optimizer=train.optimizer, extra={"bad": bad})
    bad = ckpt.resume()
    for step in range(1, 3):
        train.step()
        bad += 1
        ckpt.save(step)


def an_attribute(train: Training) -> None:
    ckpt = Checkpointer(
        model=train.model, optimizer=train.optimizer, extra={"best_loss": train.best}
    )
    train.best = 0.25
    ckpt.save(1)


def an_attribute_in_another_method(train: Training) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.best = 0.5
            self.ckpt = Checkpointer(
                model=train.model, optimizer=train.optimizer, extra={"best": self.best}
            )

        def step(self) -> None:
            self.best /= 2
            self.ckpt.save(1)

    Trainer().step()


def in_a_dict(train: Training) -> None:
    epoch = 0
    ckpt = Checkpointer(
        model=train.model, optimizer=train.optimizer, extra={"run": {"epoch": epoch}}
    )
    epoch = 1
    ckpt.save(epoch)


def a_closure(train: Training) -> None:
    def make() -> Callable[[], None]:
        count = 0
        ckpt = Checkpointer(model=train.model, optimizer=train.optimizer, extra={"count": count})

        def step() -> None:
            nonlocal count
            count += 1
            ckpt.save(count)

        return step

    make()()


def a_dict_anew(train: Training) -> None:
    ema = {"w": torch.zeros(2)}
    ckpt = Checkpointer(model=train.model, optimizer=train.optimizer, extra={"ema": ema})
    ema = {"w": ema["w"] + 1}
    ckpt.save(1)


def a_loader_anew(train: Training) -> None:
    loader: Any = torch.utils.data.StackDataset  # a module must be there before its classes
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = stateful([1, 2])
    ckpt = Checkpointer(model=train.model, optimizer=train.optimizer, loader=loader)
    loader = stateful([1, 2])
    list(loader)
    ckpt.save(1)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (a_number, "extra.bad is saved as it was given, and the script's variable bad has"),
        (an_attribute, "extra.best_loss is saved as it was given, and the script's variable train"),
        (an_attribute_in_another_method, "and the script's variable self.best has another value"),
        (in_a_dict, "Set ckpt.extra['run']['epoch'] = epoch before save(), or pass robust_slurm.h"),
        (a_closure, "extra.count is saved as it was given, and the script's variable count has"),
        (a_dict_anew, "extra.ema is saved, and the script's variable ema is another object now"),
        (a_loader_anew, "the loader that was given is saved, and the script's variable loader is"),
    ],
)
def test_what_only_a_variable_holds_is_named(
    script: Callable[[Training], None],
    says: str,
    store: FakeStore,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script(Training())
    assert says in capfd.readouterr().err


def set_there(train: Training) -> None:
    best = math.inf
    seen = {"tokens": 0}
    ckpt = Checkpointer(
        model=train.model, optimizer=train.optimizer, extra={"best": best, "seen": seen}
    )
    for step in range(1, 4):
        train.step()
        seen["tokens"] += 1
        if step == 2:
            best = ckpt.extra["best"] = 0.5
        ckpt.save(step)
    assert best == 0.5


def constant(train: Training) -> None:
    config = {"lr": 0.1, "name": "run"}
    lr, seed = config["lr"], 3
    ckpt = Checkpointer(
        model=train.model,
        optimizer=train.optimizer,
        extra={"config": dict(config), "seed": seed, "classes": ["a", "b"], "version": 0},
    )
    for step in range(1, 4):
        train.step()
        lr = float(lr) / 2
        ckpt.save(step)
    assert seed == 3


def set_in_its_dict(train: Training) -> None:
    """Another object counts something else by the same name, as accelerate's Accelerator does."""

    class Accelerator:
        def __init__(self) -> None:
            self.step = 0

    done, accelerator = {"step": 0}, Accelerator()
    ckpt = Checkpointer(model=train.model, optimizer=train.optimizer, extra={"done": done})
    for step in range(1, 4):
        for _ in range(2):
            train.step()
            accelerator.step += 1
        done["step"] = step
        ckpt.save(step)


def still_there_by_another_name(train: Training) -> None:
    average = model = torch.nn.Linear(2, 2)
    ckpt = Checkpointer(model=train.model, optimizer=train.optimizer, extra={"average": average})
    model = torch.nn.Linear(2, 2)
    train.step()
    ckpt.save(1)
    assert average is not model


def held_by_functions(train: Training) -> None:
    bad = 0

    def put(value: int) -> None:
        nonlocal bad
        bad = value

    ckpt = Checkpointer(
        model=train.model,
        optimizer=train.optimizer,
        extra={"bad": robust_slurm.held(lambda: bad, put)},
    )
    for step in range(1, 4):
        train.step()
        bad = step
        ckpt.save(step)


@pytest.mark.parametrize(
    "script", [set_there, set_in_its_dict, constant, still_there_by_another_name, held_by_functions]
)
def test_what_is_saved_as_it_is_is_not_named(
    script: Callable[[Training], None], store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    script(Training())
    err = capfd.readouterr().err
    assert "variable" not in err and "not saved" not in err


def test_no_variable_is_kept_alive() -> None:
    class Step:
        """An object that a step leaves behind, such as its graph."""

    given = [1]
    variables = Variables({"extra.given": given}, sys._getframe())
    batch = Step()
    gone = weakref.ref(batch)
    assert not list(variables.changed({"extra.given": given}, sys._getframe()))
    del batch
    assert gone() is None


def test_a_value_is_handed_over_by_two_functions(tmp_path: Path) -> None:
    best = {"loss": 0.5}
    held = robust_slurm.held(lambda: best["loss"], lambda value: best.update(loss=value))
    opened = source(write(tmp_path / "s", *capture({"extra.best": held}, rank=0)))
    best["loss"] = 9.0
    restore({"extra.best": held}, [opened], rank=0)
    assert best == {"loss": 0.5}
    with pytest.raises(TypeError, match=r"held\(get=\.\.\.\): a function, such as"):
        robust_slurm.held(0.5, print)  # type: ignore[arg-type]
