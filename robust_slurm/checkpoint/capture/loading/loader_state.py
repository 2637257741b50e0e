"""The state of a loader of data, and what a user should know of how the script reads from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import data

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
                self._paces.append((loader, _Pace(keeper, corrected=_is_accelerates(found))))
                if loader.num_workers > 0 and not loader.in_order:
                    self._remarks.append(
                        "in_order=False: torchdata does not restore its position exactly"
                    )

    @property
    def keepers(self) -> list[Keeper]:
        """The keepers of its StatefulDataLoaders."""
        return [pace.keeper for _, pace in self._paces]

    def collect(self) -> Encoded:
        """Find the tensors (``leaves``), and return all else, encoded."""
        return collected(self.key, self.get(), self._add, self._leaves)

    def _add(self, path: str, tensor: torch.Tensor) -> Encoded:
        """Put a state of a generator, which is a new tensor every time, where the last one was."""
        if tensor.dtype is torch.uint8 and tensor.is_cpu and tensor.dim() == 1:
            last = self._kept.get(path)
            if last is None or last.shape != tensor.shape:
                last = self._kept[path] = tensor.clone()
            else:
                last.copy_(tensor)
            tensor = last
        return self._leaves.add(path, tensor)

    def note_epochs(self, epochs: dict[str, int]) -> None:
        """Note the script's counts of epochs at a step that is saved."""
        for loader, pace in self._paces:
            pace.keeper.note_epochs(loader, epochs)

    def saved(self, taken: int) -> list[str]:
        """Note that save() was called. Return what the user should know, each text once.

        ``taken``: batches taken from all loaders that were given."""
        for loader, pace in self._paces:
            iterator = loader._iterator
            pace.saved(taken, over=iterator is not None and iterator._finished)
        return self.remarks()

    def remarks(self) -> list[str]:
        """Return what the user should know, each text once."""
        found, self._remarks = self._remarks, []
        for keeper in self.keepers:
            found += keeper.remarks
            keeper.remarks = []
        return [f"{self.key}: {text}" for text in found]


class _Pace:
    """Compares batches taken with steps saved."""

    def __init__(self, keeper: Keeper, *, corrected: bool) -> None:
        """``corrected``: the state is that of the last batch that the script got."""
        self.keeper = keeper
        self._corrected = corrected
        self._taken: list[int] = []
        self._first = self._still = self._saves = 0
        self._everywhere = -1

    def saved(self, everywhere: int, *, over: bool) -> None:
        """Note that a step is saved. ``everywhere``: batches taken from all loaders that were
        given: while another one is in use, this one may rest. ``over``: it has no more batches in
        this pass."""
        keeper, taken = self.keeper, self._taken
        if not taken:
            self._first = keeper.given
        self._still = self._still + 1 if self._everywhere == everywhere else 1
        self._everywhere = everywhere
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
            if not self._corrected and each > 0 and each == taken[2] - taken[1] and ahead > 0:
                keeper.remarks.append(
                    f"{ahead} more {'batch was' if ahead == 1 else 'batches were'} taken from it "
                    f"before the first save() than the {each} of each later step. If the script "
                    "reads ahead (a prefetcher), a restart leaves out what was read and not "
                    "trained: read ahead by workers (num_workers, prefetch_factor) instead"
                )
        if len(taken) > 3:
            del taken[0]


def _is_accelerates(found: Any) -> bool:
    return any(each.__module__.startswith("accelerate.") for each in type(found).__mro__)


def _known_gaps(found: Any) -> Iterator[str]:
    """Yield what is known to be lacking in the states of datasets and of torchdata's nodes."""
    for sampler in _samplers_of_nodes(found, 12):
        if not hasattr(sampler, "state_dict"):
            yield (
                f"the SamplerWrapper of torchdata's nodes saves how many samples a "
                f"{type(sampler).__name__} gave, not its order: after a restart another epoch may "
                "come in another order. Give it torchdata.stateful_dataloader.sampler."
                "RandomSampler, or a sampler with a state_dict()"
            )
    for source in (found, *(getattr(each, "dataset", None) for each in loaders(found))):
        if type(source).__module__.partition(".")[0] != "datasets":
            continue
        parts = list(_examples(getattr(source, "_ex_iterable", None), 20))
        for each in parts:
            if "BufferShuffled" in type(each).__name__:
                yield (
                    f"the shuffle buffer of datasets' shuffle(buffer_size={each.buffer_size}) is "
                    "in no state: a restart leaves out the samples in it and gives the others in "
                    "another order. Shuffle shards, or before the training, or read by "
                    "robust_slurm.data"
                )
        if any(map(_reads_ahead, parts)):
            yield (
                "datasets' map() and filter() over Parquet, JSON or Arrow save the position after "
                "the chunk of samples that they read (seen in datasets 4.7): a restart leaves out "
                "the rest of the chunk. Do their work in collate_fn, or read by robust_slurm.data"
            )


def _samplers_of_nodes(at: Any, depth: int) -> Iterator[Any]:
    """Yield the samplers that draw in a tree of torchdata's nodes."""
    if not depth or not type(at).__module__.startswith("torchdata.nodes"):
        return
    sampler = vars(at).get("sampler")
    known = isinstance(sampler, (data.SequentialSampler, range, list))
    known = known or type(sampler).__module__.startswith("torchdata.")  # its iterators have states
    if type(at).__name__ == "SamplerWrapper" and not known:
        yield sampler
    for part in list(vars(at).values()):
        yield from _samplers_of_nodes(part, depth - 1)


def _examples(at: Any, depth: int) -> Iterator[Any]:
    """Yield the steps of a streaming dataset of Hugging Face's."""
    if at is None or not depth:
        return
    yield at
    for part in (getattr(at, "ex_iterable", None), *(getattr(at, "ex_iterables", None) or ())):
        yield from _examples(part, depth - 1)


def _reads_ahead(step: Any) -> bool:
    mapped = type(step).__name__ in ("MappedExamplesIterable", "FilteredExamplesIterable")
    return mapped and bool(getattr(step.ex_iterable, "iter_arrow", None))
