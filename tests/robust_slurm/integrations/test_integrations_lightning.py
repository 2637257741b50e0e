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
