"""Steps that are not saved, beside a stand-in for robust-task's store: cheap, kept for the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_training import Training, fake_store
from fake_checkpoint_store import FakeStore

from robust_slurm.checkpoint.capture.leaves import Batch
from robust_slurm.checkpoint.copying.slots import map_file
from robust_slurm.checkpoint.format.layout import read_snapshot
from robust_slurm.checkpoint.training import moment


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
def test_the_last_step_is_saved_as_it_was_when_save_was_called(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_disk: bool
) -> None:
    """Steps 1 to 4, of which 3 alone is asked for; then half a step, and the end."""
    files = []
    monkeypatch.setattr(FakeStore, "_answer", keeping(files, FakeStore._answer))
    for every in (1, 3):
        store.welcome |= {"every": every, "first": 0}
        training = Training(directory=tmp_path / "durable", loader=Position())
        training.ckpt.resume()
        if on_disk:
            training.ckpt._session.saver.room.leave_memory("no room")  # type: ignore[union-attr]
        training.run(1, 4)
        if every == 3:  # running averages, generators, the loader and extra go on
            training.model(torch.randn(4, 8)).square().mean().backward()
            training.ckpt._objects["loader"].at += 1
            training.ckpt.extra["note"] = "later"
        training.ckpt.close()
    saved = [file for file in files if file[0].step == 4]
    (as_was, tensors), (later, others) = saved[0], saved[-1]
    assert len(saved) == 2 and later.values == as_was.values
    assert tensors.keys() == others.keys()
    assert all(torch.equal(others[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("how", ["changed", "elsewhere", "one item", "large"])
def test_a_last_step_that_is_gone_is_not_saved_and_that_is_said(
    store: FakeStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    how: str,
) -> None:
    """``one item`` and ``large`` (then not all is summed up): a write that counts no version."""
    if how == "large":
        monkeypatch.setattr(moment, "WHOLE", 0)
    store.welcome |= {"every": 3, "first": 0}
    training = Training(directory=tmp_path / "durable")
    training.ckpt.resume()
    training.run(1, 4)
    parameter = next(training.model.parameters())
    with torch.no_grad():
        if how == "changed":
            parameter.mul_(0.5)
        elif how == "one item":
            parameter.data[0, 0] += 1
        elif how == "large":
            parameter.data.mul_(0.5)
        else:
            parameter.data = parameter.data * 0.5
    training.ckpt.close()
    assert [m["step"] for m in store.said("saved")] == [3]
    assert "step 4 was not saved" in capfd.readouterr().err


def test_a_step_that_is_not_saved_looks_at_no_tensor(
    store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at where each tensor lies takes longer than all else together."""
    store.welcome |= {"every": 3, "first": 0}
    training = Training(directory=tmp_path / "durable")
    training.ckpt.resume()
    training.run(1, 4)
    looks: list[Batch] = []
    unchanged = Batch.unchanged
    monkeypatch.setattr(Batch, "unchanged", lambda batch: looks.append(batch) or unchanged(batch))
    training.step(5)
    buffers = len(looks)  # of the model: somebody may replace them
    training.step(6)
    assert (buffers, len(looks) - buffers) == (1, 3)
    training.ckpt.close()


class Position:
    """Stands for a loader that knows where it is."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def keeping(files: list[Any], answer: Any) -> Any:
    """Reads each snapshot when the store hears of it."""

    def kept(store: FakeStore, message: dict[str, Any]) -> None:
        if message["op"] == "saved":
            path = store.path.parent / message["file"]
            snapshot, plan = read_snapshot(str(path))
            tensors = {name: t.clone() for name, t in map_file(path, plan).items()}
            files.append((snapshot, tensors))
        answer(store, message)

    return kept
