"""Optimizers whose state_dict() leaves state out: taken out of a wrapper, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from robust_slurm import Checkpointer


def model() -> torch.nn.Module:
    return torch.nn.Linear(4, 4)


class Wrapper(torch.optim.Optimizer):
    """Imitate accelerate's AcceleratedOptimizer: a subclass that never calls Optimizer.__init__."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


class WrapperWithMore(Wrapper):
    """A Lookahead without a state_dict()."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.slow: list[torch.Tensor] = []


class StandInDistributedOptimizer:
    """A stand-in for megatron.core's DistributedOptimizer: the interface that matters here."""

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": {"param_groups": [{"step": 3, "lr": 0.1}]}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def save_parameter_state(self, filename: str) -> None: ...


class NoTensors:
    def state_dict(self) -> dict[str, Any]:
        return {"step": 3, "groups": [{"lr": 0.1}]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_a_wrapped_optimizer_is_taken_out_of_its_wrapper() -> None:
    network = model()
    bare = torch.optim.AdamW(network.parameters())
    checkpointer = Checkpointer(model=network, optimizer=Wrapper(Wrapper(bare)))
    assert len(bare._optimizer_step_pre_hooks) == 1
    checkpointer.close()
    assert not bare._optimizer_step_pre_hooks


def test_an_optimizer_for_each_parameter_is_called_by_its_number() -> None:
    network = model()
    given = {p: torch.optim.SGD([p]) for p in network.parameters()}
    checkpointer = Checkpointer(model=network, optimizer=given)
    assert all(len(each._optimizer_step_pre_hooks) == 1 for each in given.values())
    checkpointer.close()


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        (Wrapper(None), "optimizer: Wrapper wraps no torch optimizer"),
        (StandInDistributedOptimizer(), "integrations.megatron"),
        ([NoTensors()], "optimizer.0: the state_dict() of NoTensors holds no tensors"),
        (WrapperWithMore(torch.optim.SGD(model().parameters())), "what it keeps in slow would be"),
        ({"a": StandInDistributedOptimizer()}, "optimizer.a: StandInDistributedOptimizer"),
    ],
)
def test_what_leaves_state_out_is_refused_by_name(optimizer: Any, says: str) -> None:
    with pytest.raises(TypeError) as refusal:
        Checkpointer(model=model(), optimizer=optimizer)
    assert says in str(refusal.value)


def test_zero_redundancy_optimizer_is_refused(world: None) -> None:
    network = model()
    optimizer = ZeroRedundancyOptimizer(network.parameters(), torch.optim.AdamW, lr=0.1)
    with pytest.raises(TypeError, match=r"ZeroRedundancyOptimizer.*fully_shard"):
        Checkpointer(model=network, optimizer=optimizer)
