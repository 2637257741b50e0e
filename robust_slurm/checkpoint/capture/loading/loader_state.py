"""The state of a loader of data, and what a user should know of how the script reads from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..object_state import ObjectState, collected
from ..values import Encoded
from .passes import Keeper, attach, loaders

STILL = 3  # saved steps without a batch


class LoaderState(ObjectState):
    """A loader of data, such as torchdata's StatefulDataLoader, or an object that holds one."""

    def __init__(self, key: str, found: Any) -> None:
        super().__init__(key, found)
        self._kept: dict[str, torch.Tensor] = {}
        self._remarks = list(_known_gaps(found))
        self._paces: list[tuple[Any, _Pace]] = []
        for loader in loaders(found):
            keeper = attach(loader)
            if keeper is None:
                self._remarks.append(
                    "this release of torchdata is not known: random numbers of workers and the "
                    "order of samplers without a state may differ after a restart. Use 0.11"
                )
            else:
                self._paces.append((loader, _Pace(keeper)))
                if loader.num_workers > 0 and not loader.in_order:
                    self._remarks.append(
                        "in_order=False: torchdata does not restore its position exactly"
                    )

    @property
    def keepers(self) -> list[Keeper]:
        """What is known of each StatefulDataLoader."""
        return [pace.keeper for _, pace in self._paces]

    def collect(self) -> Encoded:
        """Find the tensors (``leaves``), and return all else, encoded."""
        return collected(self.key, self.get(), self._add, self._leaves)

    def _add(self, path: str, tensor: torch.Tensor) -> Encoded:
        """Put a state of a generator, which is a new tensor every time, where the last one was."""
        name = path[len(self.key) + 1 :]
        if tensor.dtype is torch.uint8 and tensor.is_cpu and tensor.dim() == 1:
            last = self._kept.get(name)
            if last is None or last.shape != tensor.shape:
                last = self._kept[name] = tensor.clone()
            else:
                last.copy_(tensor)
            tensor = last
        return self._leaves.add(name, tensor)

    def note_epochs(self, epochs: dict[str, int]) -> None:
        """Note the script's counts of epochs at a step that is saved."""
        for loader, pace in self._paces:
            pace.keeper.note_epochs(loader, epochs)

    def saved(self) -> list[str]:
        """Note that save() was called. Return what the user should know, each text once."""
        for loader, pace in self._paces:
            iterator = loader._iterator
            pace.saved(over=iterator is not None and iterator._finished)
        found, self._remarks = self._remarks, []
        for keeper in self.keepers:
            found += keeper.remarks
            keeper.remarks = []
        return [f"{self.key}: {text}" for text in found]


class _Pace:
    """Compares batches taken with steps saved."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self._taken: list[int] = []
        self._first = self._still = self._saves = 0

    def saved(self, *, over: bool) -> None:
        """Note that a step is saved. ``over``: the loader has no more batches in this pass."""
        keeper, taken = self.keeper, self._taken
        if not taken:
            self._first = keeper.given
        self._still = self._still + 1 if taken and taken[-1] == keeper.taken else 1
        taken.append(keeper.taken)
        if self._still == STILL and (over or not keeper.taken):
            keeper.remarks.append(
                f"no batch was taken from it in the last {STILL} saved steps, so its position is "
                "not that of the training: itertools.cycle() repeats batches that it keeps, and a "
                "copy or a wrapper of it has a position of its own. Give the loader that the "
                "script iterates, and begin a new pass over it at its end"
            )
        self._saves += 1
        if self._saves == 3:
            each = taken[1] - taken[0]
            ahead = self._first - each
            if each > 0 and each == taken[2] - taken[1] and ahead > 0:
                keeper.remarks.append(
                    f"{ahead} more {'batch was' if ahead == 1 else 'batches were'} taken from it "
                    f"before the first save() than the {each} of each later step. If the script "
                    "reads ahead (a prefetcher), a restart leaves out what was read and not "
                    "trained: read ahead by workers (num_workers, prefetch_factor) instead"
                )
        if len(taken) > 3:
            del taken[0]


def _known_gaps(found: Any) -> Iterator[str]:
    """Yield what is known to be lacking in the states of datasets."""
    for source in (found, *(getattr(each, "dataset", None) for each in loaders(found))):
        if type(source).__module__.partition(".")[0] != "datasets":
            continue
        if size := _shuffle_buffer(getattr(source, "_ex_iterable", None)):
            yield (
                f"the shuffle buffer of datasets' shuffle(buffer_size={size}) is in no state: a "
                f"restart leaves out the samples in it (up to {size}) and gives the others in "
                "another order. Shuffle the shards and not the samples, or "
                "shuffle before training, or read by robust_slurm.data"
            )


def _shuffle_buffer(at: Any, depth: int = 20) -> int:
    """Return the size of the shuffle buffer of a streaming dataset, 0 if it has none."""
    if at is None or not depth:
        return 0
    if "BufferShuffled" in type(at).__name__:
        return int(at.buffer_size)
    parts = [getattr(at, "ex_iterable", None), *(getattr(at, "ex_iterables", None) or ())]
    return max(_shuffle_buffer(part, depth - 1) for part in parts)
