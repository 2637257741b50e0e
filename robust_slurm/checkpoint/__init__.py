"""Fault-aware checkpoints: every step in memory, a replica where the fault cannot reach.

Two halves: what robust-task and the tools use is standard library only (``layout``, ``store``,
``transfer``, ``placement``, ``plan``, ``durable``); what runs in the training process needs torch
(``values``, ``state``, ``snapshot``, ``checkpointer``, ``writer``, ``reader``). Importing this
package imports neither.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .training.checkpointer import Checkpointer, CheckpointError

__all__ = ["CheckpointError", "Checkpointer"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from .training import checkpointer

        return getattr(checkpointer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
