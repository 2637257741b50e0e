"""Optimizers whose ``state_dict()`` is not their whole state: unwrapped, or refused by name.

A checkpoint without moments or master weights resumes without an error and trains something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from .values import holds_tensor


def checked(optimizers: Any, key: str = "optimizer") -> Any:
    """Return the optimizers as given, without the wrapper that accelerate puts around each.

    ``optimizers``: one, or a list or dict of them, or None. Raises TypeError that names the
    optimizer and what to pass instead.
    """
    if isinstance(optimizers, Mapping):
        return {name: checked(each, f"{key}.{name}") for name, each in optimizers.items()}
    if isinstance(optimizers, list | tuple):
        return [checked(each, f"{key}.{i}") for i, each in enumerate(optimizers)]
    kind = type(optimizers).__name__
    if isinstance(optimizers, Optimizer):
        if "_optimizer_step_pre_hooks" not in vars(optimizers):  # Optimizer.__init__ never ran
            inner = getattr(optimizers, "optimizer", None)
            if not isinstance(inner, Optimizer):
                raise TypeError(f"{key}: {kind} wraps no torch optimizer; pass a torch optimizer")
            return checked(inner, key)
        if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizers).__mro__):
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
    if hasattr(optimizers, "state_dict") and not holds_tensor(optimizers.state_dict()):
        raise TypeError(
            f"{key}: the state_dict() of {kind} holds no tensors, so its moments would be lost. "
            "Pass the torch optimizer inside it; if it has no tensors at all, pass it in extra="
        )
    return optimizers
