"""Megatron-LM and NeMo: the state that Megatron's DistributedOptimizer leaves out of state_dict().

::

    from robust_slurm.integrations.megatron import MegatronOptimizerState

    ckpt = robust_slurm.Checkpointer(
        model=[chunk.module for chunk in model],
        optimizer=MegatronOptimizerState(optimizer),
        extra={"schedule": opt_param_scheduler},
    )

Nothing of Megatron is imported: the methods are those of megatron.core 0.16's optimizers.
"""

from __future__ import annotations

from typing import Any


class MegatronOptimizerState:
    """A Megatron optimizer, or a ChainedOptimizer of several, with all of its state.

    Of a DistributedOptimizer that is each rank's own part of moments and master weights, as
    ``get_parameter_state_dp_reshardable`` gives them, without a gather. It is restored into the
    same number of ranks only. All of it is copied inside ``save``.
    """

    def __init__(self, optimizer: Any) -> None:
        """Take an optimizer. Raises TypeError if its parameters change outside its ``step``."""
        self._optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        for each in self._optimizers:
            kind, config = type(each).__name__, getattr(each, "ddp_config", None)
            distributed = hasattr(each, "get_parameter_state_dp_reshardable")
            if hasattr(each, "save_parameter_state") and not distributed:
                raise TypeError(f"optimizer: {kind} is not an optimizer of megatron.core 0.16")
            if getattr(config, "overlap_param_gather", False):
                raise TypeError(
                    f"optimizer: {kind} gathers parameters during the next forward pass, so a "
                    "snapshot would hold old ones. Run with overlap_param_gather=False"
                )
            if getattr(config, "use_megatron_fsdp", False):
                raise TypeError(f"optimizer: {kind} with Megatron-FSDP is not supported")

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers."""
        return [group for each in self._optimizers for group in each.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state; the tensors are the live ones."""
        return {"optimizers": [_state(each) for each in self._optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it. Raises ValueError where the optimizers are others."""
        saved = state["optimizers"]
        if len(saved) != len(self._optimizers):
            raise ValueError(
                f"{len(saved)} optimizers were saved, here are {len(self._optimizers)}"
            )
        for each, part in zip(self._optimizers, saved, strict=True):
            _load(each, part)


def _state(optimizer: Any) -> dict[str, Any]:
    if not hasattr(optimizer, "get_parameter_state_dp_reshardable"):
        return {"common": optimizer.state_dict()}
    if not optimizer.optimizer.state:  # before the first step state_dict() fails
        return {"common": None, "masters": _masters(optimizer)}
    live = optimizer.get_parameter_state_dp_reshardable()
    return {"common": optimizer.state_dict(), "buckets": list(map(list, _buckets(live)))}


def _load(optimizer: Any, saved: dict[str, Any]) -> None:
    if saved["common"] is None:
        for master, tensor in zip(_masters(optimizer), saved["masters"], strict=True):
            master.data.copy_(tensor)
        return
    optimizer.load_state_dict(saved["common"])  # and makes room for what follows
    if "buckets" not in saved:
        return
    for part in optimizer.optimizer.state.values():
        # Without Transformer Engine it gives all parameters one tensor, which each then counts up.
        if hasattr(part.get("step"), "clone"):
            part["step"] = part["step"].clone()
    live = optimizer.get_parameter_state_dp_reshardable()
    buckets = _buckets(live)
    if list(map(_places, buckets)) != list(map(_places, saved["buckets"])):
        raise ValueError(
            "the parameters are divided otherwise than when they were saved: use the same number "
            "of ranks and the same bucket size"
        )
    for bucket, there in zip(buckets, saved["buckets"], strict=True):
        for part, tensors in zip(bucket, there, strict=True):
            part.update(tensors, padding=False)
    optimizer.load_parameter_state_from_dp_reshardable(live)


def _masters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _buckets(state: dict[Any, Any]) -> list[list[dict[str, Any]]]:
    """Return all buckets of a state from get_parameter_state_dp_reshardable.

    The state maps a buffer's number to {types: buckets}, beside totals."""
    buffers = [state[key] for key in sorted(key for key in state if isinstance(key, int))]
    return [bucket for buffer in buffers for found in buffer.values() for bucket in found]


def _places(bucket: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(part["gbuf_local_start"], part["gbuf_local_end"]) for part in bucket]
