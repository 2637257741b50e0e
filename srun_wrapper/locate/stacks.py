"""Stacks as keys for grouping, and the calls in which a rank waits for other ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

Stack = Sequence[str]
"""Frames of a main thread, the innermost first, each "function (file:line)"."""

Key = tuple[str, ...]
"""The frames without line numbers."""

INNER = 8  # frames in which a collective is looked for: wrappers and hooks are around it
_LINE = re.compile(r":\d+\)$")
_COLLECTIVES = frozenset({
    "all_reduce", "allreduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor",
    "_reduce_scatter_base", "all_gather", "allgather", "all_gather_into_tensor",
    "all_gather_object", "all_gather_coalesced", "_all_gather_base", "gather_object",
    "scatter_object_list", "broadcast_object_list", "all_to_all", "alltoall", "all_to_all_single",
    "barrier", "monitored_barrier", "batch_isend_irecv", "_wait_batch_p2p", "wait_tensor",
})  # fmt: skip
"""Functions whose name says it, in whichever file."""
_IN_TORCH = frozenset(
    {"broadcast", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv", "wait"}
)
"""Functions that wait for ranks where they are torch.distributed's."""
_DISTRIBUTED = ("torch/distributed/", "distributed_c10d.py", "megatron/core/", "deepspeed/comm/")
_WHOLE = ("torch/distributed/distributed_c10d.py", "distributed_c10d.py")
"""Files in which all work after the start is communication."""
_INNERMOST = (
    ("_engine_run_backward", "torch/autograd/graph.py"),  # DDP and FSDP reduce gradients in it
    ("synchronize", "torch/cuda/__init__.py"),
)


@lru_cache(maxsize=1 << 16)
def without_line(frame: str) -> str:
    """ "f (a.py:12)" -> "f (a.py)"."""
    return _LINE.sub(")", frame)


def key(stack: Stack) -> Key:
    """Return what two stacks in the same calls have in common."""
    return tuple(map(without_line, stack))


def _function(frame: str) -> tuple[str, str]:
    function, _, file = without_line(frame).rpartition(" (")
    return function.rpartition(".")[2], file.removesuffix(")")


def waits(stack: Stack) -> str:
    """Return the call in which these frames wait for other ranks; "" if they are in none."""
    for number, frame in enumerate(stack[:INNER]):
        function, file = _function(frame)
        there = any(file.startswith(name) for name in _DISTRIBUTED)
        if function in _COLLECTIVES or (there and function in _IN_TORCH):
            return without_line(frame)
        if number == 0 and (file in _WHOLE or (function, file) in _INNERMOST):
            return without_line(frame)
    return ""
