"""State of the process at the first call of the function that ``resilient`` marks.

When the function runs again, it must find what it would find in a new process. Weights and the like
are the Checkpointer's. The state here counts before ``resume()``: a random split of the data that
is drawn there must be the same on all ranks.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class FirstEntry:
    """Torch's modes and the random generators, noted in the training's thread."""

    def __init__(self) -> None:
        """Note the state of the thread's modes and generators. Raises anything."""
        self._generators: dict[str, Any] = {}
        self._modes = _modes()
        if "torch" in sys.modules:
            from robust_slurm.checkpoint.capture import rng

            self._generators = rng.states()

    def check(self) -> None:
        """Raise RuntimeError if a ``with`` block of torch was left without its end."""
        if self._modes and _modes() != self._modes:
            raise RuntimeError("torch computes no gradients or casts, as it did not at the start")

    def put_back(self) -> None:
        """Restore the random generators to their first state. Raises anything."""
        if self._generators:
            from robust_slurm.checkpoint.capture import rng

            rng.restore(self._generators)


def _modes() -> list[bool]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    found = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    try:
        return [*found, *map(torch.is_autocast_enabled, ("cuda", "cpu"))]
    except TypeError:  # before torch 2.4
        return [*found, torch.is_autocast_enabled(), torch.is_autocast_cpu_enabled()]
