"""Hugging Face's Trainer with RobustCallback: killed anywhere, it ends as if nothing had happened.

That is: weights, data, the logged losses, evaluations, callbacks' counts, the final training loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from extras import needs
from framework_runs import run, undisturbed
from torch_forks import TorchForks

pytestmark = [pytest.mark.slow, needs("transformers", "frameworks")]
PROGRAM = "fw_transformers.py"


@pytest.fixture(scope="module")
def forks() -> Iterator[TorchForks]:
    with TorchForks("transformers.trainer", "torchdata.stateful_dataloader") as forks:
        yield forks


# An epoch is 6 steps, of which the last has half a batch; a loss is logged every 4th step, an
# evaluation follows every 5th. -14: after the last step.
@pytest.mark.parametrize(
    ("kills", "options", "steps"),
    [
        ([1, random.choice((3, 4, 5, 6))], (), 14),
        ([7, 11, -14], (), 14),
        ([4, -6], ("--stop=1",), 6),
    ],
)
def test_killed_it_ends_as_if_it_never_was(
    forks: TorchForks, kills: list[int], options: tuple[str, ...], steps: int, tmp_path: Path
) -> None:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = undisturbed(forks, PROGRAM, tmp_path / "whole", 14, *options)
    again = run(forks, PROGRAM, tmp_path / "killed", 14, kills, *options)
    assert list(whole.curve) == list(range(1, steps + 1))
    assert again == whole, f"killed in steps {kills}"


REFUSED = """
import tempfile, torch
from transformers import Trainer, TrainingArguments
from robust_slurm.integrations.transformers import RobustCallback

def trainer(**options):
    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, **options)
    made = Trainer(torch.nn.Linear(1, 1), args, train_dataset=[0])
    made.add_callback(RobustCallback(made, directory="unused"))
    return made

for name in ("auto_find_batch_size", "ignore_data_skip"):
    try:
        trainer(**{name: True}).train()
    except TypeError as error:
        print(error)
del Trainer._load_from_checkpoint
try:
    trainer()
except RuntimeError as error:
    print(error)
"""


def test_what_cannot_be_resumed_is_refused_by_name(forks: TorchForks) -> None:
    """And a release that lacks what is used, by the name of that and of the release."""
    done = forks.start(REFUSED)
    assert done.wait() == 0, done.err()
    batch, skip, release = done.out().splitlines()
    assert batch.startswith("auto_find_batch_size is not") and skip.startswith("ignore_data_skip")
    assert "has no Trainer._load_from_checkpoint" in release
    assert "tested with transformers 5.23.0 and 4.57.6" in release
