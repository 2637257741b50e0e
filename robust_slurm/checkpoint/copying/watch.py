"""Compare a snapshot with the live tensors, bit for bit, to find writers besides the optimizer.

torch counts no version for a write through ``.data``, a NumPy view or a CUDA graph, and a write
after save() is not in the snapshot. Only a comparison of the data shows such writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from .snapshot import CHUNK, pieces

LEAST_PAUSE = 0.001  # s between two looks
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an item → the type that holds its bits."""


def differing(saved: Sequence[torch.Tensor], live: Sequence[torch.Tensor]) -> set[int]:
    """Indices of the tensors whose bits differ. ``saved`` are on the host."""
    with torch.no_grad():
        pairs = enumerate(zip(saved, live, strict=True))
        return {i for i, (one, other) in pairs if not same_bits(one, other)}


def same_bits(saved: torch.Tensor, live: torch.Tensor) -> bool:
    """True if both hold the same bits: NaN equals itself, and 0.0 differs from -0.0."""
    if saved.shape != live.shape or saved.dtype != live.dtype:
        return False
    if not saved.numel():
        return True
    if live.is_cpu:
        return torch.equal(_bits(saved), _bits(live))
    return same_in_pieces(saved, live)


def same_in_pieces(saved: torch.Tensor, live: torch.Tensor) -> bool:
    """Compare as ``same_bits`` does, on a device that may not have room for all at once."""
    for piece, others in pieces(saved, live):
        one, other = _bits(piece), _bits(others)
        step = max(1, CHUNK // one.itemsize)
        for at in range(0, len(one), step):
            if not torch.equal(one[at : at + step].to(other.device), other[at : at + step]):
                return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(WHOLE[flat.itemsize])


class Watch:
    """Compares the live tensors again and again, from save() to the next optimizer step."""

    def __init__(self, live: Sequence[torch.Tensor]) -> None:
        self.live = live
        self._saved: Sequence[torch.Tensor] | None = None
        self._found: set[int] = set()
        self._stop, self._over = threading.Event(), threading.Event()
        self.seconds = 0.0
        """Seconds that the last look took."""

    def run(self, saved: Sequence[torch.Tensor] | None) -> None:
        """Compare until ``stop``, in the copy thread. ``saved``: the copies of ``live``, in the
        same order; None if the copy failed. Raises nothing."""
        self._saved = saved
        try:
            while saved is not None and not self._stop.is_set():
                self._look(saved)
                self._stop.wait(max(LEAST_PAUSE, self.seconds))
        except Exception:  # noqa: BLE001 - end() looks once more and raises what there is to raise
            pass
        finally:
            self._over.set()

    def stop(self) -> None:
        self._stop.set()

    def end(self, deadline: float) -> tuple[set[int], set[int]]:
        """Stop. Return the indices of tensors that ever differed, and of those that differ now."""
        self._stop.set()
        if not self._over.wait(deadline) or self._saved is None:
            return set(), set()
        now = self._look(self._saved)
        return self._found, now

    def _look(self, saved: Sequence[torch.Tensor]) -> set[int]:
        began = time.perf_counter()
        now = differing(saved, self.live)
        self._found |= now
        self.seconds = time.perf_counter() - began
        return now
