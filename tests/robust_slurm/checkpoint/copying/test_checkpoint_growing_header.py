"""A snapshot stays right when its header outgrows the room that its slot has for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpointed_training import Training, fake_store
from fake_checkpoint_store import FakeStore

from robust_slurm.checkpoint.copying.slots import map_file
from robust_slurm.checkpoint.format.layout import read_snapshot


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_header_that_grows_moves_no_tensor(store: FakeStore, every: int, resumed: bool) -> None:
    """The tensors are larger than the growth: what is moved within one file would overlap."""
    training = Training(directory=store.path.parent, every=every)
    training.model.append(torch.nn.Linear(8, 60_000))
    training.optimizer.add_param_group({"params": training.model[-1].parameters()})
    if resumed:
        training.ckpt.resume()
    for number in range(1, 5):
        loss = training.model(torch.randn(4, 8)).square().mean()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.ckpt.extra["note"] = "x" * (60_000 * number)
        training.ckpt.save(number)
        saved = store.wait("saved", number)[-1]
        path = store.path.parent / saved["file"]
        got = map_file(path, read_snapshot(str(path))[1])
        for name, parameter in training.model.named_parameters():
            assert torch.equal(got[f"model.{name}"], parameter), (number, name)
    training.ckpt.close()
