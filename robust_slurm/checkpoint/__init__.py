"""Fault-aware checkpoints: every step in memory, a replica where the fault cannot reach.

Two halves. robust-task and the tools use the standard library only (``store``, ``transfer``,
``planning``, most of ``format`` and ``durable``). The training process and the durable tier's
writer need torch (``capture``, ``copying``, ``training``, ``durable.dcp``). Importing this package
imports neither half.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .training.checkpointer import Checkpointer, CheckpointError, StrictError

__all__ = ["CheckpointError", "Checkpointer", "StrictError"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from .training import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
