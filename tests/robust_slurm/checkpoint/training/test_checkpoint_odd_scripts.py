"""Odd scripts: resumed to the bit, or what differs is named, or they are refused; never silent."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_files import source, write
from checkpointed_training import fake_store
from fake_checkpoint_store import FakeStore
from odd_scripts import (
    Added,
    Best,
    BestArrays,
    Conjugates,
    DefaultDevice,
    EqualValues,
    Expanded,
    Masters,
    ModelInExtra,
    NoModel,
    NoModule,
    Number,
    OtherSchedule,
    Own,
    Schedulers,
    Script,
    Temperature,
    Unfrozen,
    crash_and_resume,
    same,
)  # fmt: skip
from torch import nn

from robust_slurm import Checkpointer, CheckpointError
from robust_slurm.checkpoint.capture.state import State
from robust_slurm.checkpoint.copying import turns


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


@pytest.mark.parametrize(
    "script",
    [
        Temperature, NoModel, NoModule, ModelInExtra, Masters, Own, Schedulers, Conjugates,
        EqualValues, Expanded, DefaultDevice, Best, BestArrays,
    ],
)  # fmt: skip
def test_it_is_resumed_to_the_bit(
    script: type[Script], store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    assert same(*crash_and_resume(script, store))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (Number, ["extra.count was restored, and the script has not read it"]),
        (Added, ["extra.best was set after", "extra.schedule was set after"]),
        (Unfrozen, ["model.2.weight, 2.bias was trained, not frozen"]),
        (OtherSchedule, ["extra.schedule: saved from another kind of scheduler", "step_size"]),
    ],
)
def test_what_cannot_be_carried_over_is_named(
    script: type[Script], said: list[str], store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    crash_and_resume(script, store)
    err = capfd.readouterr().err
    assert [text for text in said if text not in err] == [] and "extra.name" not in err


def test_parameters_that_a_model_in_extra_has_are_saved_once(store: FakeStore) -> None:
    script = ModelInExtra()
    script.resume()
    assert script.ckpt is not None and script.ckpt._session is not None
    names = [item.entry.name for item in script.ckpt._session._state.capture()[0]]
    assert [name for name in names if name.startswith("optimizer.parameters")] == []
    script.ckpt.close()


@pytest.mark.parametrize("tied_again", [True, False])
def test_two_weights_that_became_one_are_refused(store: FakeStore, tied_again: bool) -> None:
    class Tied(Script):
        def make(self) -> None:
            self.optimizer = torch.optim.SGD([self.model[0].bias], lr=0.01)
            if self.again or not tied_again:
                self.model[2].weight = self.model[0].weight

    if tied_again:
        with pytest.raises(CheckpointError, match="are one tensor here, but were saved as two"):
            crash_and_resume(Tied, store)
    else:
        assert same(*crash_and_resume(Tied, store))


def refused_masked() -> dict[str, Any]:
    return {"extra": {"x": numpy.ma.MaskedArray([1.0, 2.0], [0, 1])}}


def refused_keys() -> dict[str, Any]:
    return {"model": {1: nn.Linear(1, 1), "1": nn.Linear(1, 1)}}


def refused_state() -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.state[1, 2]["n"] = 1
    return {"optimizer": optimizer}


def refused_orphan() -> dict[str, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.state[nn.Parameter(torch.ones(2))]["n"] = 1
    return {"optimizer": optimizer}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (refused_masked, "extra.x: a numpy.ma.MaskedArray cannot be saved"),
        (refused_keys, "model: two of its keys are the same as text"),
        (refused_state, "optimizer: its state holds a part for a tuple"),
        (refused_orphan, "optimizer: its state holds a part for a parameter that is in none of"),
    ],
)
def test_what_cannot_be_saved_whole_is_refused(given: Any, why: str, store: FakeStore) -> None:
    with pytest.raises(TypeError, match=why):
        Checkpointer(**given()).resume()


def test_an_optimizer_waits_for_a_save_in_another_thread(
    store: FakeStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save() does not begin, either, while another thread's optimizer steps."""
    script = Script()
    script.resume()
    saving, go_on = threading.Event(), threading.Event()

    assert script.ckpt is not None and script.ckpt._session is not None
    saver = script.ckpt._session.saver
    assert saver is not None
    take = saver._moments.collect

    def collect(*, trusting: bool = False) -> Any:
        found = take(trusting=trusting)
        saving.set()
        assert go_on.wait(30)
        return found

    monkeypatch.setattr(saver._moments, "collect", collect)
    before = script.model[0].weight.detach().clone()
    thread = threading.Thread(target=script.ckpt.save, args=[1])
    thread.start()
    assert saving.wait(30)
    script.ckpt, ckpt = None, script.ckpt
    stepping = threading.Thread(target=script.step, args=[1])
    stepping.start()
    stepping.join(0.3)
    assert stepping.is_alive() and torch.equal(before, script.model[0].weight)
    go_on.set()
    thread.join(30)
    stepping.join(30)
    assert not torch.equal(before, script.model[0].weight)

    def saves(*_: Any) -> None:
        other = threading.Thread(target=ckpt.save, args=[2])
        other.start()
        other.join(30)

    handle = script.optimizer.register_step_pre_hook(saves)
    script.step(2)
    handle.remove()
    assert (
        "step 2 is not saved: save() was called while an optimizer steps" in capfd.readouterr().err
    )
    ckpt.save(3)
    ckpt.close()
    assert [m["step"] for m in store.wait("saved", 2)] == [1, 3]


@pytest.mark.slow
def test_a_second_one_for_the_same_place_is_refused(store: FakeStore) -> None:
    first, second = Script(), Script()
    first.resume()
    with pytest.raises(CheckpointError, match="another Checkpointer that saves to the same place"):
        second.resume()
    assert first.ckpt is not None
    first.ckpt.close()
    assert Script().resume() == 0


@pytest.mark.slow
def test_one_that_nobody_refers_to_is_closed_when_another_begins(store: FakeStore) -> None:
    """A function raises, and is called again with a smaller batch."""

    def train(*, fails: bool) -> None:
        ckpt = Checkpointer(**Script().given())
        ckpt.resume()
        if fails:
            raise MemoryError
        ckpt.close()

    with contextlib.suppress(MemoryError):
        train(fails=True)
    train(fails=False)


def test_closed_or_forked_it_says_that_nothing_is_saved(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    script.resume()
    assert script.ckpt is not None
    pid = os.fork()
    if not pid:
        try:
            script.ckpt.save(1)
            script.ckpt.save(2)
            script.ckpt.resume()
        except CheckpointError as error:
            os.write(2, f"refused: {error}\n".encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    script.ckpt.close()
    script.ckpt.save(1)
    script.ckpt.save(2)
    err = capfd.readouterr().err
    assert err.count("is not saved: this Checkpointer belongs to the process") == 1
    assert err.count("refused: this Checkpointer belongs to the process") == 1
    assert err.count("later ones are not saved: the Checkpointer is closed") == 1


def test_extra_is_a_dict_to_a_script(store: FakeStore, capfd: pytest.CaptureFixture[str]) -> None:
    ckpt = Checkpointer(model=nn.Linear(2, 2), extra={"n": 1, "set": frozenset((0, 8)), "w": [1]})
    ckpt.resume()
    for name, value in (("n", 2), ("set", frozenset((8, 0))), ("w", [2])):
        ckpt.extra.restore(name, value)
    assert ckpt.extra.setdefault("n", 3) == 2
    assert type(deepcopy(ckpt.extra)) is dict
    assert type(ckpt.extra.copy()) is dict and ckpt.extra.unread == set()
    ckpt.extra = {"n": 5}  # type: ignore[assignment]
    ckpt.save(1)
    ckpt.save(2)
    ckpt.close()
    assert capfd.readouterr().err.count("ckpt.extra was replaced by another dict") == 1
    assert [m["step"] for m in store.said("saved")] == [1, 2]


def test_a_step_waits_for_no_save_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The save may wait for a lock that the stepping thread holds."""
    monkeypatch.setattr(turns, "DEADLINE", 0.01)
    both = turns.Turns()
    with both.save() as alone, ThreadPoolExecutor(1) as other:
        assert alone and other.submit(both.step).result(30) is False


def test_what_an_earlier_version_has_not_saved_is_named(store: FakeStore) -> None:
    script = Temperature()
    script.step(1)
    state = State(script.given(), rank=0)
    items, values = state.capture()
    del values["optimizer"]["d"]["parameters"]
    path = write(store.path.parent / "earlier", items, values)
    again = State(Temperature(again=True).given(), rank=0)
    again.restore([source(path)])
    (note,) = again.notes
    assert "without 1 parameter of this optimizer that no model has" in note
