"""Optimizers whose ``state_dict()`` is not their whole state: refused by name.

A checkpoint without moments or master weights resumes without an error and trains something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .beside.attributes import optimizers_in
from .values import holds_tensor


def checked(optimizers: Any, key: str = "optimizer") -> Any:
    """Return the optimizers as given, without the wrapper that accelerate puts around each.

    ``optimizers``: one, or a list or dict of them, or None. Raises TypeError that names the
    optimizer and what to pass instead.
    """
    if isinstance(optimizers, Mapping):
        if any(isinstance(name, Tensor) for name in optimizers):  # an optimizer for each parameter
            optimizers = list(optimizers.values())
        else:
            return {name: checked(each, f"{key}.{name}") for name, each in optimizers.items()}
    if isinstance(optimizers, list | tuple):
        return [checked(each, f"{key}.{i}") for i, each in enumerate(optimizers)]
    kind = type(optimizers).__name__
    if isinstance(optimizers, Optimizer):
        names = [base.__name__ for base in type(optimizers).__mro__]
        if "AcceleratedOptimizer" in names:  # accelerate's; it has no state of its own
            inner = getattr(optimizers, "optimizer", None)
            if not isinstance(inner, Optimizer):
                raise TypeError(f"{key}: {kind} wraps no torch optimizer; pass a torch optimizer")
            return checked(inner, key)
        asked = type(optimizers).state_dict is not Optimizer.state_dict
        if not asked and "_optimizer_step_pre_hooks" not in vars(optimizers):
            return _unwrapped(optimizers, key)  # its Optimizer.__init__ never ran
        if "ZeroRedundancyOptimizer" in names:
            raise TypeError(
                f"{key}: {kind} is not supported: its state_dict() holds nothing but what "
                "consolidate_state_dict() last gathered on one rank. Use "
                "torch.distributed.fsdp.fully_shard with a plain optimizer"
            )
        return optimizers
    if hasattr(optimizers, "save_parameter_state"):
        raise TypeError(
            f"{key}: {kind} leaves moments and master weights out of its state_dict(). Pass "
            "robust_slurm.integrations.megatron.MegatronOptimizerState(optimizer) instead"
        )
    alone = not any(True for _ in optimizers_in(optimizers))
    if alone and hasattr(optimizers, "state_dict") and not holds_tensor(optimizers.state_dict()):
        raise TypeError(
            f"{key}: the state_dict() of {kind} holds no tensors, so its moments would be lost. "
            "Pass the torch optimizer inside it; if it has no tensors at all, pass it in extra="
        )
    return optimizers


def _unwrapped(wrapper: Optimizer, key: str) -> Any:
    """Return the optimizer in a wrapper that has nothing else and no state_dict(). TypeError if it
    has."""
    kind = type(wrapper).__name__
    inside = dict(optimizers_in(wrapper))
    if not inside:
        raise TypeError(f"{key}: {kind} wraps no torch optimizer; pass a torch optimizer")
    if list(vars(wrapper)) == [first := next(iter(inside))]:
        return checked(inside[first], key)
    others = [name for name in vars(wrapper) if name not in inside]
    raise TypeError(
        f"{key}: {kind} has no state_dict() of its own and never calls Optimizer.__init__(), so "
        f"what it keeps in {', '.join(others[:3])} would be lost. Give it a state_dict() and a "
        f"load_state_dict(), or pass {kind}.{first} alone if it has no other state"
    )
