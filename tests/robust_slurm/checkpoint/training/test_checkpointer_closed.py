"""Closing a Checkpointer: it holds nothing afterwards, whenever and however often it is closed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch
from checkpointed_training import Training, fake_store
from fake_checkpoint_store import FakeStore
from waiting import until

from robust_slurm import Checkpointer, CheckpointError
from robust_slurm.checkpoint.capture.state import State
from robust_slurm.checkpoint.training.saver import Saver


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


@pytest.mark.slow
def test_closed_it_lets_go_of_everything(store: FakeStore) -> None:
    """At once: what is trained or evaluated next needs the memory."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = Checkpointer(model=model, optimizer=optimizer, extra={"n": 1})
    checkpointer.resume()
    for step in (1, 2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        checkpointer.save(step)
    held = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    gc.collect()
    gc.disable()
    try:
        checkpointer.close()
        del model, optimizer
        assert [each() for each in held] == [None] * len(held)
    finally:
        gc.enable()
    assert checkpointer.extra == {"n": 1}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "never begun", "interrupted"])
def test_ended_it_holds_nothing(
    store: FakeStore, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A reference to it keeps no training alive; no thread is left. A schedule refers to its
    optimizer, which refers to itself: that is left to the garbage collector."""
    threads = set(threading.enumerate())
    training = Training(directory=store.path.parent, every=2)
    checkpointer = training.ckpt
    if how == "never begun":
        checkpointer.save(1.5)  # type: ignore[arg-type]
        assert "step 1.5 was not saved: TypeError" in capfd.readouterr().err
    else:
        checkpointer.resume()
        training.run(1, 3)
    if how == "interrupted":
        monkeypatch.setattr(Saver, "flush", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.close()
    checkpointer.close()
    held = [weakref.ref(each) for each in (training.model, *training.model.parameters())]
    del training
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
    until(lambda: set(threading.enumerate()) <= threads, "the end of its threads")


def interrupted(_saver: Saver, _timeout: float) -> str:
    raise KeyboardInterrupt


def test_closed_again_while_it_closes(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Close twice, like a signal handler or another thread: both end together."""
    training = Training(directory=store.path.parent, every=2)
    training.ckpt.resume()
    training.run(1, 3)
    calls: list[float] = []

    def flush(_saver: Saver, timeout: float) -> str:
        calls.append(timeout)
        training.ckpt.close()
        return ""

    monkeypatch.setattr(Saver, "flush", flush)
    training.ckpt.close()
    assert len(calls) == 1 and capfd.readouterr().err == ""


def test_closed_while_it_resumes(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    collect = State.collect

    def closing(state: State, keys: Collection[str]) -> None:
        training.ckpt.close()
        collect(state, keys)

    monkeypatch.setattr(State, "collect", closing)
    with pytest.raises(CheckpointError, match="closed while it resumed"):
        training.ckpt.resume()
