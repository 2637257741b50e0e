"""torchtitan's trainer, by a stand-in: the real one needs a GPU and a nightly torch.

``StandInTrainer`` has the attributes and the order of calls of ``torchtitan.trainer.Trainer`` 0.3:
``checkpointer.load`` once, then in each step the count, ``train_step``, ``checkpointer.save``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from robust_slurm.integrations.torchtitan import attach

STEPS = 9


class Container:
    """OptimizersContainer, LRSchedulersContainer: what they contain is all that is looked at."""

    def __init__(self, **lists: list[Any]) -> None:
        vars(self).update(lists)


class Manager:
    """CheckpointManager, switched off as by default; what it is asked is kept."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def load(self, step: int = -1) -> bool:
        self.asked.append(("load", step))
        return False

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        self.asked.append(("save", curr_step, last_step))
        return False

    def close(self) -> None:
        self.asked.append("close")


class StandInTrainer:
    def __init__(self) -> None:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        self.model_parts = [model]
        self.optimizers = Container(optimizers=[optimizer])
        self.lr_schedulers = Container(schedulers=[schedule])
        self.dataloader = StatefulDataLoader(torch.randn(20, 4), 2, shuffle=True)
        self.checkpointer = Manager()
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, until: int = STEPS) -> None:
        self.checkpointer.load(step=-1)
        data = iter(self.dataloader)
        while self.step < until:
            self.step += 1
            inputs = next(data)
            self.optimizers.optimizers[0].zero_grad()
            (self.model_parts[0](inputs).sum() - 1).square().backward()
            self.optimizers.optimizers[0].step()
            self.lr_schedulers.schedulers[0].step()
            self.ntokens_seen += len(inputs)
            self.checkpointer.save(self.step, last_step=self.step == STEPS)

    def close(self) -> None:
        self.checkpointer.close()


def test_it_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole = StandInTrainer()
    whole.train()
    first = StandInTrainer()
    attach(first, directory=tmp_path, every=2)
    first.train(until=4)
    first.close()
    assert first.checkpointer.asked[0] == ("load", -1) and first.checkpointer.asked[-1] == "close"
    again = StandInTrainer()
    attach(again, directory=tmp_path, every=2)
    again.train()
    again.close()
    saves = [("save", step, step == STEPS) for step in range(5, STEPS + 1)]
    assert again.checkpointer.asked == [*saves, "close"]  # theirs is not loaded over ours
    assert again.state_dict() == whole.state_dict() == {"step": STEPS, "ntokens_seen": 2 * STEPS}
    for one, other in zip(
        again.model_parts[0].parameters(), whole.model_parts[0].parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_another_release_is_refused() -> None:
    trainer = StandInTrainer()
    del trainer.lr_schedulers
    with pytest.raises(RuntimeError, match=r"torchtitan.*lr_schedulers.*tested with"):
        attach(trainer)
