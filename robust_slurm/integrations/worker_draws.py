"""Find out whether a DataLoader's workers draw random numbers: random augmentation."""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

LOOKS = 4  # batches of a worker that are watched


class WorkerDraws:
    """Watches the workers of a DataLoader; ``seen`` is true once one has drawn a random number.

    It takes the place of the loader's ``worker_init_fn`` and ``collate_fn``, which call the
    loader's own.
    """

    def __init__(self, loader: Any) -> None:
        self._flag = multiprocessing.Value("b", 0, lock=False)
        looks = [LOOKS]
        begun: list[Any] = []
        loader.worker_init_fn = partial(_initialise, begun, loader.worker_init_fn)
        loader.collate_fn = partial(_collate, begun, looks, self._flag, loader.collate_fn)

    @property
    def seen(self) -> bool:
        """True if a worker has drawn a random number."""
        return bool(self._flag.value)


def _initialise(begun: list[Any], inner: Callable[[int], Any] | None, worker: int) -> None:
    if inner is not None:
        inner(worker)
    begun[:] = [_states()]


def _collate(
    begun: list[Any], looks: list[int], flag: Any, inner: Callable[[Any], Any], samples: Any
) -> Any:
    batch = inner(samples)
    if begun and looks[0]:
        looks[0] -= 1
        if _states() != begun[0]:
            flag.value = 1
    return batch


def _states() -> Any:
    """Return the states of the generators that torch seeds in a worker, to compare them."""
    found: list[Any] = [torch.get_rng_state().tolist(), random.getstate()]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found.append((kind, keys.tobytes(), *rest))
    return found
