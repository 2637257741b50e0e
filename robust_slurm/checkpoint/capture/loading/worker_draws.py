"""Find out if workers of a plain DataLoader draw random numbers, which no state holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .generators import process_state, same

LOOKS = 3  # batches of a worker that are watched


def watch(loader: Any) -> torch.Tensor | None:
    """Have new workers of a loader set the flag that is returned once they draw a random number;
    None if it has no workers."""
    if not getattr(loader, "num_workers", 0):
        return None
    flag = torch.zeros(1, dtype=torch.uint8)
    flag.share_memory_()  # type: ignore[no-untyped-call]
    loader.worker_init_fn = partial(_initialise, flag, loader.worker_init_fn)
    return flag


def _initialise(flag: torch.Tensor, inner: Callable[[int], Any] | None, worker: int) -> None:
    """Run in a new worker."""
    if inner is not None:
        inner(worker)
    kinds: Any = torch.utils.data._DatasetKind
    kinds.create_fetcher = staticmethod(partial(_watched, flag, kinds.create_fetcher))


def _watched(flag: torch.Tensor, make: Callable[..., Any], *given: Any) -> Any:
    fetcher = make(*given)
    fetch, left = fetcher.fetch, [LOOKS]

    def look(index: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            fetcher.fetch = fetch
        before = process_state()
        try:
            return fetch(index)
        finally:
            if not same(before, process_state()):
                flag[0] = 1

    fetcher.fetch = look
    return fetcher
