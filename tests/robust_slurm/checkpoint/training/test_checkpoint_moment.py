"""save() reads two items of each tensor only if they are copied later."""

from __future__ import annotations

import torch

from robust_slurm.checkpoint.capture.state import Share, State
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


def test_what_save_copies_itself_is_compared_with_nothing() -> None:
    model, optimizer = trained()
    state = State({"model": model, "optimizer": optimizer}, rank=0, share=Share((0, 1)))
    moments = Moments(state, ABOUT, steady=True)
    late = moments.collect().late
    same, expected = moments.read(late, 5, whole=True, copied=True)
    assert expected is None and same() == state.fingerprint(whole=True)()
