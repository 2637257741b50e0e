"""Megatron's DistributedOptimizer (the real one): killed, it goes on with moments and masters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extras import needs
from framework_runs import run, undisturbed
from torch_forks import TorchForks

from robust_slurm.integrations.megatron import MegatronOptimizerState

pytestmark = [pytest.mark.slow, needs("megatron.core", "frameworks")]


@pytest.fixture(scope="module")
def forks() -> Iterator[TorchForks]:
    with TorchForks("megatron.core.distributed", "megatron.core.optimizer") as forks:
        yield forks


@pytest.mark.parametrize(("options", "ranks"), [((), 2), (("--tp=2", "--pp=2"), 4)])
def test_killed_it_ends_as_if_it_never_was(
    options: tuple[str, ...], ranks: int, forks: TorchForks, tmp_path: Path
) -> None:
    """Each rank has its part of moments and masters (data parallel), or of each layer and of the
    layers (tensor parallel, in a pipeline); one is killed in any step."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    kill = random.choice([-1, 1]) * random.randrange(2, 6)
    program = "fw_megatron.py"
    whole = undisturbed(forks, program, tmp_path / "whole", 6, *options, ranks=ranks)
    again = run(forks, program, tmp_path / "killed", 6, [kill], *options, ranks=ranks)
    assert again == whole, f"killed in step {kill}"
    held = [whole.end["masters"], *(other.end["masters"] for other in whole.others)]
    assert all(held.count(masters) == 1 for masters in held)  # they hold parts of their own


class Config:
    def __init__(self, **settings: bool) -> None:
        vars(self).update(settings)


class StandInDistributedOptimizer:
    """A stand-in for the attributes that are looked at; their names are the real ones."""

    def __init__(self, **settings: bool) -> None:
        self.ddp_config = Config(**settings)

    def save_parameter_state(self, filename: str) -> None: ...

    def get_parameter_state_dp_reshardable(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("setting", "says"),
    [("overlap_param_gather", "old ones"), ("use_megatron_fsdp", "Megatron-FSDP")],
)
def test_what_cannot_be_carried_over_is_refused(setting: str, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        MegatronOptimizerState(StandInDistributedOptimizer(**{setting: True}))


REAL_NAMES = """
import dataclasses
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
for name in ("save_parameter_state", "get_parameter_state_dp_reshardable"):
    assert hasattr(DistributedOptimizer, name), name
assert hasattr(ChainedOptimizer, "save_parameter_state")
fields = {each.name for each in dataclasses.fields(DistributedDataParallelConfig)}
assert {"overlap_param_gather", "use_megatron_fsdp"} <= fields
"""


def test_the_names_are_the_real_ones(forks: TorchForks) -> None:
    done = forks.start(REAL_NAMES)
    assert done.wait() == 0, done.err()
