"""save() reads the live tensors once, for the other ranks and for the copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from robust_slurm.checkpoint.capture.state import Share, State
from robust_slurm.checkpoint.copying.sample import TensorSample
from robust_slurm.checkpoint.copying.slots import Slot
from robust_slurm.checkpoint.copying.snapshot import Copy, TornError
from robust_slurm.checkpoint.format.layout import Snapshot
from robust_slurm.checkpoint.training.moment import Moments

ABOUT = Snapshot(0, 0, 2, 0, "job", {}, (0, 1), None, ())


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 9)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_one_sample_serves_the_other_ranks_and_the_copy(
    rank: int, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained()
    share = Share((0, 1)) if shared else None
    state = State({"model": model, "optimizer": optimizer}, rank=rank, share=share)
    moments = Moments(state, ABOUT, steady=True)
    form, _values, late, early = moments.collect()
    taken: list[TensorSample] = []
    take = TensorSample.take
    monkeypatch.setattr(TensorSample, "take", lambda self: (taken.append(self), take(self))[1])
    same, expected = moments.read(late, 5, whole=False, copied=False)
    assert len(taken) == 1
    assert same() == state.fingerprint(whole=False, step=5)()
    slot = Slot(tmp_path / "own-0-0.safetensors", 0)
    copy = Copy(1, slot, form, late, early, lambda: "{}", expected=expected)
    late[-1].data.zero_()
    copy.run()
    assert isinstance(copy.error, TornError) and copy.error.indices == [len(late) - 1]


def test_what_save_copies_itself_is_compared_with_nothing() -> None:
    model, optimizer = trained()
    state = State({"model": model, "optimizer": optimizer}, rank=0, share=Share((0, 1)))
    moments = Moments(state, ABOUT, steady=True)
    late = moments.collect().late
    same, expected = moments.read(late, 5, whole=True, copied=True)
    assert expected is None and same() == state.fingerprint(whole=True)()
