"""Changes of the state behind the Checkpointer's back, or after save(), are found by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_training import CalledTraining, fake_store
from fake_checkpoint_store import FakeStore
from waiting import until

from robust_slurm.checkpoint.copying import guard
from robust_slurm.checkpoint.copying.guard import CAREFUL
from robust_slurm.checkpoint.copying.slots import map_file
from robust_slurm.checkpoint.copying.watch import same_bits
from robust_slurm.checkpoint.format.layout import read_snapshot
from robust_slurm.checkpoint.training import moment
from robust_slurm.checkpoint.training.options import DEBUG

Change = Callable[[torch.Tensor], object]
WEIGHT = "model.0.weight"
BRIEF = moment.BRIEF


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    monkeypatch.setattr(moment, "BRIEF", 0)  # as if the state were large
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


def through_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[...] *= 0.5


def zero(weight: torch.Tensor) -> None:
    weight.data.zero_()


def zero_a_few(weight: torch.Tensor) -> None:
    """Other items than those that are compared at each step."""
    weight.data[0].zero_()


class Script(CalledTraining):
    """A training whose weights can be changed while they are copied."""

    def step_swapped_while_copied(self, number: int, change: Change = zero) -> torch.Tensor:
        """A step, then other weights while the copy thread reads. Returns what save() found."""
        go = threading.Event()
        saver: Any = self.ckpt._session.saver  # type: ignore[union-attr]
        saver._copier.submit(go.wait)
        self.step(number)
        kept = self.weight.detach().clone()
        change(self.weight)
        go.set()
        saver.settle()
        return kept


def saved_weight(store: FakeStore, which: int = -1) -> torch.Tensor:
    if which >= 0:
        store.wait("saved", which + 1)
    else:
        assert store.over.wait(20), "the last snapshot is known after close()"
    file = store.path.parent / store.said("saved")[which]["file"]
    return map_file(file, read_snapshot(str(file))[1])[WEIGHT].clone()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.ones(3, 4), torch.ones(4, 3).t(), True),
        (torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2).t(), False),
        (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), True),
        (torch.ones(3), torch.ones(3, dtype=torch.int32), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), False),
        (torch.tensor(2.0), torch.tensor(2.0), True),
        (torch.empty(0, 4), torch.empty(0, 4), True),
        (torch.ones(2), torch.ones(3), False),
    ],
)
def test_bits_are_compared(a: torch.Tensor, b: torch.Tensor, same: bool) -> None:
    assert same_bits(a.contiguous(), b) is same


@pytest.mark.parametrize("change", [lambda w: w.data.mul_(0.5), through_numpy])
def test_a_write_without_a_version_is_found_in_the_first_steps(
    store: FakeStore, change: Change, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    for number in range(1, CAREFUL + 3):
        script.step(number)
        kept = script.weight.detach().clone()
        change(script.weight)
    script.ckpt.close()
    said = capfd.readouterr().err
    assert f"{WEIGHT} changed before the next optimizer step" in said
    assert "call save() last" in said and "0.bias" not in said
    assert [m["step"] for m in store.wait("saved", CAREFUL + 2)] == list(range(1, CAREFUL + 3))
    assert torch.equal(saved_weight(store), kept)  # as it was at save(), although slow to copy


def test_weights_that_are_swapped_for_a_moment_are_found_too(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither at save() nor at the optimizer's step can it be seen, only in between."""
    script = Script()
    for number in range(1, CAREFUL + 2):
        script.step(number)
        kept = script.weight.detach().clone()
        script.weight.data.zero_()
        if number == 1:
            watch: Any = script.ckpt._session.saver._guard._watch  # type: ignore[union-attr]
            until(partial(bool, watch._found), "a look during the evaluation")
        script.weight.data.copy_(kept)
    script.ckpt.close()
    assert f"{WEIGHT} changed before" in capfd.readouterr().err
    assert torch.equal(saved_weight(store), kept)


def test_a_write_that_begins_later_spoils_one_snapshot(
    store: FakeStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may have come before or after it: the snapshot is withdrawn."""
    monkeypatch.setattr(guard, "CHECK_SHARE", 1e9)  # as after a pause
    script = Script()
    for number in range(1, CAREFUL + 2):
        script.step(number)
    script.ckpt._session.saver.settle()  # type: ignore[union-attr] # it is complete
    assert capfd.readouterr().err == ""
    script.weight.data.mul_(0.5)
    script.step(CAREFUL + 2)
    said = capfd.readouterr().err
    assert f"step {CAREFUL + 1} was discarded: {WEIGHT} changed before" in said
    (told,) = store.wait("unusable")
    assert told["step"] == CAREFUL + 1
    # Its slot is the next one to be used: the two good steps before it stay.
    assert store.wait("saved", CAREFUL + 2)[-1]["file"] == told["file"]
    script.ckpt.close()


def test_a_write_while_a_step_is_copied_throws_it_away_before_the_next_hook(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    """The script may die before its next optimizer step, so nothing may come to compare later."""
    script = Script()
    for number in range(1, CAREFUL + 1):
        script.step(number)
    kept = script.step_swapped_while_copied(CAREFUL + 1)
    assert [m["step"] for m in store.wait("skipped")] == [CAREFUL + 1]
    said = capfd.readouterr().err
    assert f"step {CAREFUL + 1} was discarded: {WEIGHT} changed before" in said
    assert "0.bias" not in said
    script.weight.data.copy_(kept)
    kept = script.step_swapped_while_copied(CAREFUL + 2)
    assert torch.equal(saved_weight(store, CAREFUL), kept)
    script.ckpt.close()
    assert [m["step"] for m in store.said("saved")] == [*range(1, CAREFUL + 1), CAREFUL + 2]


def test_no_write_can_spoil_a_small_state(
    store: FakeStore, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single write to a few items, long after the first steps, by a script that dies then."""
    monkeypatch.setattr(moment, "BRIEF", BRIEF)
    script = Script()
    for number in range(1, CAREFUL + 3):
        script.step(number)
    kept = script.step_swapped_while_copied(number + 1, zero_a_few)
    assert capfd.readouterr().err == "" and not store.said("skipped")
    with torch.no_grad():
        script.weight.mul_(0.5)  # counted: named, and harmless as well
    script.step(number + 2)
    script.ckpt.close()
    assert f": {WEIGHT} changed before" in capfd.readouterr().err and not store.said("unusable")
    assert torch.equal(saved_weight(store, number), kept)


def test_a_swap_back_that_counts_a_version_spoils_the_snapshot_too(
    store: FakeStore, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script()
    for number in range(1, CAREFUL + 1):
        script.step(number)
    kept = script.step_swapped_while_copied(CAREFUL + 1, zero_a_few)
    with torch.no_grad():
        script.weight.copy_(kept)
    script.step(CAREFUL + 2)
    assert f"step {CAREFUL + 1} was discarded: {WEIGHT}" in capfd.readouterr().err
    assert store.wait("unusable")[0]["step"] == CAREFUL + 1
    script.ckpt.close()


def test_what_goes_to_disk_is_copied_inside_save(store: FakeStore, tmp_path: Path) -> None:
    """A write may be over before anybody sees that the copy was spoilt."""
    script = Script(directory=tmp_path / "durable", every=CAREFUL + 1)
    for number in range(1, CAREFUL + 1):
        script.step(number)
    kept = script.step_swapped_while_copied(CAREFUL + 1)
    script.weight.data.copy_(kept)
    assert store.wait("saved", CAREFUL + 1)[-1]["persist"]
    assert torch.equal(saved_weight(store, CAREFUL), kept)
    script.ckpt.close()


def test_the_last_snapshot_is_compared_before_it_is_written(
    store: FakeStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script(directory=tmp_path / "durable")
    for number in range(1, CAREFUL + 1):
        script.step(number)
    kept = script.step_swapped_while_copied(CAREFUL + 1, zero_a_few)
    script.weight.data.copy_(kept)
    script.ckpt.close()
    said = capfd.readouterr().err
    assert f"the last step is not in {tmp_path}/durable: step {CAREFUL + 1} was discarded" in said
    assert WEIGHT in said
    (told,) = store.wait("unusable")
    assert told["step"] == CAREFUL + 1
    # Nor does a store find it that never got the message.
    assert (tmp_path / "s" / told["file"]).read_bytes()[:8] == bytes(8)
    assert not store.said("flush")


@pytest.mark.parametrize("since", [1, CAREFUL + 2])
def test_steps_that_no_hook_sees_end_the_copy_in_the_background(
    store: FakeStore, since: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Repeat the steps like a CUDA graph."""
    script = Script()
    for number in range(1, since + 4):
        if number < since:
            script.step(number)
            continue
        script.backward()
        if script.ckpt._session is not None:  # a copy that is still running finds the write itself
            script.ckpt._session.saver.settle()
        for p in script.model.parameters():
            assert p.grad is not None
            p.detach().numpy()[...] -= 0.1 * p.grad.numpy()
            p.grad = None
        script.ckpt.save(number)
        kept = script.weight.detach().clone()
    script.ckpt.close()
    said = capfd.readouterr().err
    assert "no optimizer given to the Checkpointer was seen to step" in said
    assert said.count("robust-slurm:") == 1
    assert torch.equal(saved_weight(store), kept)


def test_in_debug_mode_nothing_is_ever_copied_in_the_background(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(DEBUG, "1")
    script = Script()
    for number in range(1, CAREFUL + 4):
        script.step(number)
        assert script.ckpt._session.saver._newest.at_once  # type: ignore[union-attr]
    kept = script.weight.detach().clone()
    script.weight.data.mul_(0.5)
    script.step(number + 1)
    assert torch.equal(saved_weight(store, number - 1), kept)
    script.ckpt.close()
    assert f"{WEIGHT} changed before" in capfd.readouterr().err
