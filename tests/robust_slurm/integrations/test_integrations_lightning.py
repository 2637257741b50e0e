"""Lightning with RobustCallback: killed anywhere, it ends as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from extras import needs
from framework_runs import Run, run, undisturbed
from torch_forks import TorchForks

pytestmark = [pytest.mark.slow, needs("lightning", "frameworks")]
STEPS = 9  # 3 of an epoch
PROGRAM = "fw_lightning.py"


@pytest.fixture(scope="module")
def forks() -> Iterator[TorchForks]:
    with TorchForks("lightning.pytorch", "torchdata.stateful_dataloader") as forks:
        yield forks


def check(forks: TorchForks, tmp_path: Path, kills: list[int], *options: str) -> Run:
    """Require that a killed training ends as one without the callback does."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = undisturbed(forks, PROGRAM, tmp_path / "whole", STEPS, *options)
    again = run(forks, PROGRAM, tmp_path / "killed", STEPS, kills, *options)
    assert again == whole, f"killed in steps {kills}"
    return whole


@pytest.mark.parametrize(
    ("loader", "kills"),
    [
        ("plain", [random.choice((2, 3)), random.choice((5, 6, 7))]),
        ("workers", [5, STEPS]),  # after a validation within an epoch
        ("stateful", [4, 6]),  # in the first step after an epoch
        ("stateful", [3, 4, 5]),  # likewise, after a resume amid that epoch
    ],
)
def test_killed_it_ends_as_if_it_never_was(
    forks: TorchForks, loader: str, kills: list[int], tmp_path: Path
) -> None:
    whole = check(forks, tmp_path, kills, f"--loader={loader}")
    assert whole.end["batches"] == 36  # none is trained twice, none left out


def test_an_early_stop_is_not_forgotten(forks: TorchForks, tmp_path: Path) -> None:
    """Training by epochs; killed after the last step: no step is trained after it."""
    whole = check(forks, tmp_path, [3, -6], "--limit=epochs", "--early=2")
    assert list(whole.curve) == [1, 2, 3, 4, 5, 6]


REFUSED = """
import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from robust_slurm.integrations.lightning import RobustCallback

class Loads(pl.Callback):
    def on_load_checkpoint(self, *_): ...

class Ahead(BoringModel):
    def training_step(self, dataloader_iter): ...

def refused(module, *callbacks, **options):
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[RobustCallback(directory="unused"), *callbacks], **options,
    )
    try:
        trainer.fit(module)
    except (TypeError, RuntimeError) as error:
        print(error)

refused(BoringModel(), LearningRateFinder())
refused(BoringModel(), Loads())
refused(Ahead())
refused(BoringModel(), reload_dataloaders_every_n_epochs=2)
del pl.strategies.Strategy.process_dataloader
refused(BoringModel())
"""


def test_what_cannot_be_resumed_is_refused_by_name(forks: TorchForks) -> None:
    """And a release that lacks what is used, by the name of that and of the release."""
    done = forks.start(REFUSED)
    assert done.wait() == 0, done.err()
    finder, loads, ahead, reload, release = done.out().splitlines()
    assert finder.startswith("LearningRateFinder trains steps that are undone")
    assert loads.startswith("Loads restores state in on_load_checkpoint()")
    assert "dataloader_iter" in ahead and "reload_dataloaders_every_n_epochs" in reload
    assert "has no Trainer.strategy.process_dataloader" in release
    assert "tested with lightning 2.6.6 and 2.5.6" in release
