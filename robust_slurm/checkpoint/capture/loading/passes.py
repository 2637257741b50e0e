"""Passes over torchdata's StatefulDataLoader that a restart repeats to the bit.

torchdata restores a position, not what led to it: generators that a sampler draws from, counts that
a sampler keeps, random numbers of workers, an iterator that the script holds already, and whether
a pass whose batches are all done is over. ``attach`` has a loader make iterators that keep these.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, cast
from zlib import crc32

import torch

from .. import rng
from .generators import (
    LoaderGenerators,
    counts,
    forget_restored,
    mark_epochs,
    process_state,
    same,
    set_counts,
    sets_epoch,
)
from .worker_state import draws, taken_out, wrapped

OURS = "robust_slurm"
"""Key of our part of a loader's state; torchdata leaves it alone."""
FINISHED = "_iterator_finished"
_MODULE = "torchdata.stateful_dataloader.stateful_dataloader"
_BASES = ("_StatefulSingleProcessDataLoaderIter", "_StatefulMultiProcessingDataLoaderIter")
_SAMPLER, _ITER = "_index_sampler_state", "_sampler_iter_state"
_YIELDED, _COUNTED = "_sampler_iter_yielded", {"samples_yielded"}
MANY = 256  # items of a container that are looked at: more are data
LOOKS = 3  # batches whose making is watched for draws of the sampler

_made: dict[type, type] = {}


def at_its_end(state: Any) -> Any:
    """Return a loader's state at the end of an epoch, so that its next pass is a new one.

    A loader that has given its last batch has not seen the end; its next pass would have no batch.
    """
    known = isinstance(state, dict) and FINISHED in state
    return {**state, FINISHED: True} if known else state


def loaders(root: object, depth: int = 3) -> list[Any]:
    """Return the StatefulDataLoaders that an object is, or holds in its attributes."""
    found: dict[int, Any] = {}
    if module := sys.modules.get(_MODULE):
        _find(root, depth, module.StatefulDataLoader, found, set())
    return list(found.values())


def _find(at: object, depth: int, kind: type, found: dict[int, Any], seen: set[int]) -> None:
    # No function within a function: it would refer to itself, and keep what it found.
    if id(at) in seen or isinstance(at, (type, torch.Tensor)):
        return
    seen.add(id(at))
    held = getattr(at, "__dict__", {})
    if isinstance(at, kind) and "next_iter_state" in held:
        found[id(at)] = at
    elif depth:
        several = isinstance(at, (dict, list, tuple)) and len(at) <= MANY
        parts: Any = held.values() if not several else at
        for part in list(parts.values() if isinstance(parts, dict) else parts):
            _find(part, depth - 1, kind, found, seen)


class Keeper:
    """Keeps the facts about one loader that are not in its iterators. Raises nothing."""

    def __init__(self, loader: Any) -> None:
        self.source = LoaderGenerators(loader)
        self.first = counts(loader)
        """The counts of its samplers when it was given to the Checkpointer."""
        self._told: dict[str, Any] | None = None
        self.remarks: list[str] = []
        """Texts for the user; taken from here."""
        self.given = 0
        """Batches that this process has handed out in this pass."""
        self.taken = 0
        """The same, in all passes."""
        self.goes_on: Callable[[Any], bool] = lambda begun: False
        """Return True if the script goes on in a pass that has no more batches (see epochs.py);
        ``begun``: its counts of epochs when the pass began."""

    def note_epochs(self, loader: Any, epochs: dict[str, int]) -> None:
        """Note the script's counts of epochs at a step that is saved."""
        iterator = loader._iterator
        if isinstance(iterator, LoaderPass) and iterator._epochs is None:
            iterator._epochs = epochs

    def live(self, loader: Any) -> dict[str, Any]:
        """Return generators and counts as they are now."""
        return {"own": self.source.own(), "counts": self.changed(loader)}

    def changed(self, loader: Any) -> dict[str, Any]:
        """Return the counts of the samplers that have changed since the loader was given."""
        now = counts(loader)
        return {k: v for k, v in now.items() if k not in self.first or self.first[k] != v}

    def restore(self, loader: Any, live: dict[str, Any]) -> None:
        """Set what ``live`` returned. What the script sets after this is told by ``told``."""
        self.source.put_own(live["own"])
        set_counts(loader, live["counts"])
        mark_epochs(loader)
        self._told = counts(loader)

    def told(self, loader: Any) -> dict[str, Any]:
        """Return the counts that the script has set since ``restore``, such as its epoch."""
        now = counts(loader)
        before = self._told if self._told is not None else now
        return {k: v for k, v in now.items() if before.get(k) != v}


def attach(loader: Any) -> Keeper | None:
    """Have a StatefulDataLoader make iterators of ours; None if its torchdata is of another kind.

    It gets a subclass of its class: functions in its attributes would refer back to it, and then
    its workers would stay until the garbage collector runs. Done once for each loader.
    """
    known = vars(loader).get("_robust")
    if known is not None:
        return cast(Keeper, known)
    if any(not hasattr(sys.modules[_MODULE], name) for name in _BASES):
        return None
    keeper = loader._robust = Keeper(loader)
    loader.__class__ = _kept(type(loader))
    held = loader._iterator
    if type(held) in _bases():
        held.__class__ = _pass_of(type(held))
        held._follow(loader, None)
        held._begun = None
        held._from = held._sampler_iter_yielded  # its first indices are not known
        if loader.num_workers > 0:
            pass  # a restart tells whether such workers draw at random: see state_dict
        elif held._num_yielded == 0:
            held._begun = _begun(loader, seeds=False)
        elif _replays(held):
            keeper.remarks.append(
                f"its pass began before the Checkpointer was made, so the order of "
                f"{_sampler_name(held)} is not known: a restart in this pass may give another "
                "one. Make the Checkpointer before the first batch"
            )
    return keeper


def _bases() -> tuple[type, ...]:
    return tuple(getattr(sys.modules[_MODULE], name) for name in _BASES)


def _pass_of(base: type) -> type:
    """Return the subclass of an iterator's class that is a ``LoaderPass``."""
    if base not in _made:
        _made[base] = type(base.__name__, (LoaderPass, base), {"__module__": base.__module__})
    return _made[base]


def _kept(base: Any) -> Any:
    """Return the subclass of a StatefulDataLoader's class whose passes are repeated to the bit."""
    if base in _made:
        return _made[base]

    class Kept(base):  # type: ignore[misc]
        def load_state_dict(self, state: Any) -> None:
            held = None if self._initial_iter_for_state_dict else self._iterator
            super().load_state_dict(state)
            ours = state.get(OURS) if isinstance(state, dict) else None
            if ours is not None:
                self._robust.restore(self, ours["live"])
            if isinstance(held, LoaderPass):
                held._goes_on = self.next_iter_state

        def _get_iterator(self) -> Any:
            if self.num_workers > 0:
                self.check_worker_number_rationality()
            kind: Any = _pass_of(_bases()[self.num_workers > 0])
            return _begin(kind.__new__(kind), self)

        def __reduce_ex__(self, protocol: Any) -> Any:  # a copy is as the script made it
            state = {k: v for k, v in vars(self).items() if k != "_robust"}
            return object.__new__, (base,), {**state, "_iterator": None}

    Kept.__name__, Kept.__qualname__, Kept.__module__ = (
        base.__name__,
        base.__qualname__,
        base.__module__,
    )
    _made[base] = Kept
    return Kept


def _begin(iterator: Any, loader: Any) -> Any:
    """Initialise an iterator, at the loader's restored position if there is one."""
    state, loader.next_iter_state = loader.next_iter_state, None
    keeper, init = loader._robust, loader.worker_init_fn
    if state is None:
        old = loader._iterator
        if isinstance(old, LoaderPass):
            old._left()
        keeper.given = 0
        forget_restored(loader.dataset)
        states: dict[int, Any] = {}
    else:
        state, states = taken_out(state)
    kept, taken = process_state(), keeper.taken
    ours = None if state is None else state.get(OURS)
    iterator._follow(loader, ours)
    if loader.num_workers > 0:
        loader.__dict__["worker_init_fn"] = wrapped(states, init)
    try:
        if ours is not None and ours["begun"] is not None:
            iterator._set_begun(loader)
        iterator.__init__(loader, state)
    finally:
        loader.__dict__["worker_init_fn"] = init
    if state is not None:
        # Making it draws once more than the run that was not interrupted.
        rng.restore(kept)
        keeper.given, keeper.taken = 0, taken  # it may have read again what was done
        if ours is not None:
            keeper.source.put_own(ours["live"]["own"])
            set_counts(loader, {**ours["live"]["counts"], **iterator._told})
        iterator._resumed = not iterator._finished
        iterator._unknown = iterator._resumed and loader.num_workers > 0 and not states
    return iterator


class LoaderPass:
    """An iterator of a StatefulDataLoader: comes before torchdata's class."""

    _index_sampler: Any
    _sampler_iter: Any
    _finished: bool
    _dataset: Any
    _num_workers: int
    _num_yielded: int

    def _follow(self, loader: Any, saved: Any) -> None:
        """``saved``: our part of the state that the pass goes on from."""
        self._loader = weakref.ref(loader)
        self._keeper: Keeper = loader._robust
        self._saved = saved
        self._told = {} if saved is None else self._keeper.told(loader)
        self._same_epoch = saved is not None and sets_epoch(loader)
        self._begun: Any = _begun(loader, seeds=True) if saved is None else saved["begun"]
        self._sum = 0 if saved is None else saved["sum"]
        self._at = 0 if saved is None else saved["at"]
        self._first = 0 if saved is None else saved["first"]
        self._from = 0  # batches that the sampler goes on after
        self._epochs: dict[str, int] | None = None if saved is None else saved["epochs"]
        self._drawn: deque[int] = deque()
        self._looks = 0
        self._resumed = self._was_saved = False
        self._unknown = False  # True if the generators of its workers were not saved
        self._goes_on: Any = None
        self._next: Any = None

    def _set_begun(self, loader: Any) -> None:
        """Set generators and counts as they were when this pass began."""
        begun = self._begun
        rng.restore(begun["process"])
        self._keeper.source.put_own(begun["own"])
        set_counts(loader, {**self._keeper.first, **begun["counts"], **self._told})

    # -- the order of samples

    def _next_index(self) -> Any:
        self._looks += 1
        watched = 1 < self._looks <= LOOKS
        before = process_state() if watched else None
        index = super()._next_index()  # type: ignore[misc]
        if not _is_sampled(self):
            return index
        if self._looks == 1:
            self._begins_with(crc32(repr(index).encode()))
        total = self._drawn[-1] if self._drawn else self._sum
        self._drawn.append(crc32(repr(index).encode(), total))
        if watched and not same(before, process_state()):
            self._keeper.remarks.append(
                f"{_sampler_name(self)} draws from this process's random generators in the midst "
                "of a pass: after a restart it gives another order. Let it draw from a generator "
                "of its own, or all at the beginning of a pass"
            )
        return index

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._from = state[_YIELDED]
        if self._winds(state):
            super().load_state_dict({**state, _ITER: _unwound(state), _YIELDED: 0})  # type: ignore[misc]
            self._wind(state[_YIELDED])
        else:
            super().load_state_dict(state)  # type: ignore[misc]

    def _restore_main_state(self, state: dict[str, Any]) -> None:
        self._from = state[_YIELDED]
        if self._winds(state):
            super()._restore_main_state({**state, _ITER: _unwound(state), _YIELDED: 0})  # type: ignore[misc]
            self._wind(state[_YIELDED])
        else:
            super()._restore_main_state(state)  # type: ignore[misc]

    def _winds(self, state: dict[str, Any]) -> bool:
        """True if the sampler has no state, and its order must be begun anew."""
        if self._saved is None or self._begun is None:
            return False
        order = state[_ITER]
        counted = order is None or (isinstance(order, dict) and order.keys() == _COUNTED)
        return counted and state[_SAMPLER] is None and _is_sampled(self)

    def _wind(self, done: int) -> None:
        """Begin the order of samples as it began, and leave out what is done."""
        loader: Any = self._loader()
        self._set_begun(loader)
        self._sampler_iter = iter(self._index_sampler)
        if self._begun["seeds"]:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            if self._num_workers > 0:  # torchdata begins it twice
                self._sampler_iter = iter(self._index_sampler)
        total = 0
        for _ in range(done):
            index = next(self._sampler_iter, None)
            total = crc32(repr(index).encode(), total)
        self._sampler_iter_yielded = done
        self._sum, self._at = total, done
        if total == self._saved["sum"] or done != self._saved["at"]:
            return
        following = next(self._sampler_iter, None)
        if following is not None:
            self._sampler_iter = chain([following], self._sampler_iter)
        if following is not None or not self._is_told_epoch():
            self._keeper.remarks.append(
                f"{_sampler_name(self)} does not repeat the order of the pass that was cut off: "
                "some samples are used twice, others not at all. Give it state_dict() and "
                "load_state_dict(), or derive its order from a seed and set_epoch() alone"
            )

    # -- batches

    def __next__(self) -> Any:
        if self._next is not None:
            return next(self._next)
        loader = self._loader()
        if self._goes_on is not None:
            pending, self._goes_on = self._goes_on, None
            if loader is not None and loader.next_iter_state is pending:
                if self._num_workers > 0:
                    self._shutdown_workers()  # type: ignore[attr-defined]
                loader._iterator = _begin(self, loader)
        try:
            batch = super().__next__()  # type: ignore[misc]
        except StopIteration:
            if not self._resumed or loader is None or not self._is_over(loader):
                raise
            self._resumed = False
            # All batches of the pass were done when it was saved: this is the next pass.
            following = iter(loader)
            if following is not self:
                self._next = following
            return next(following)
        if self._drawn:
            self._sum = self._drawn.popleft()
            self._at += 1
        self._resumed = False
        self._keeper.given += 1
        self._keeper.taken += 1
        return batch

    def _begins_with(self, total: int) -> None:
        """Note the first indices that this process draws for this pass."""
        if not self._from:
            self._first = total
        elif self._first == total:
            self._keeper.remarks.append(
                f"{_sampler_name(self)} began its order anew after the restart, so samples are "
                "used twice: its state_dict() must hold its position in the pass"
            )

    def _is_over(self, loader: Any) -> bool:
        """True if the pass that a resumed step belongs to was over with that step."""
        return self._is_told_epoch() or not (self._same_epoch or self._keeper.goes_on(self._epochs))

    def _is_told_epoch(self) -> bool:
        """True if the script has set another epoch than that of the saved pass."""
        return any(path.endswith(".epoch") for path in self._told)

    def _reset(self, loader: Any, first_iter: bool = False, **options: Any) -> None:
        if not first_iter:
            self._left()
            self._follow(loader, None)
            self._begun = _begun(loader, seeds=False)
            self._keeper.given = 0
            forget_restored(self._dataset)
        super()._reset(loader, first_iter, **options)  # type: ignore[misc]

    def _left(self) -> None:
        """Note that the script begins another pass."""
        over = self._finished or self._num_yielded == _length(self._index_sampler)
        if self._was_saved and not over and self._next is None:
            self._keeper.remarks.append(
                "the script began a new pass over it before the last one was at its end: a "
                "restart from the last step of such a pass goes on in it. Let every pass end "
                "(without break, and not beside a shorter one in zip()), with a sampler of as "
                "many samples as a pass takes"
            )

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        self._was_saved = self._num_yielded > 0
        if loader is None:
            return state
        if self._unknown and draws(state):
            self._unknown = False
            self._keeper.remarks.append(
                "its workers draw at random, and those that began this pass were started before "
                "the Checkpointer was made, so their generators were not saved: the rest of the "
                "pass is drawn anew. Make the Checkpointer before iter(loader)"
            )
        begun = self._begun if _replays(self) else None
        ours = {"live": self._keeper.live(loader), "begun": begun}
        ours |= {"sum": self._sum, "at": self._at, "first": self._first, "epochs": self._epochs}
        return {**state, OURS: ours}


def _begun(loader: Any, *, seeds: bool) -> dict[str, Any] | None:
    """Return what the order of a pass that begins now may depend on. ``seeds``: it draws a seed
    for workers."""
    keeper = loader._robust
    return {"process": process_state(), **keeper.live(loader), "seeds": seeds}


def _is_sampled(iterator: Any) -> bool:
    """True if a sampler decides the order."""
    kinds = sys.modules[_MODULE]._DatasetKind
    return bool(iterator._dataset_kind == kinds.Map)


def _replays(iterator: Any) -> bool:
    """True if a restart has to begin the pass again, as nothing holds its position."""
    if not _is_sampled(iterator):
        fetcher = getattr(iterator, "_dataset_fetcher", None)
        states = (iterator._dataset, getattr(fetcher, "dataset_iter", None))
        return fetcher is not None and not any(hasattr(each, "state_dict") for each in states)
    index, order = iterator._index_sampler, iterator._sampler_iter
    held = [index, order]
    if hasattr(order, "samples_yielded"):
        held = [order.sampler, order.sampler_iter]
    ordered = torch.utils.data.SequentialSampler
    return not any(hasattr(each, "state_dict") or type(each) is ordered for each in held)


def _unwound(state: dict[str, Any]) -> Any:
    return None if state[_ITER] is None else {"samples_yielded": 0}


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except TypeError:
        return None


def _sampler_name(iterator: Any) -> str:
    own = getattr(iterator._index_sampler, "sampler", iterator._index_sampler)
    return f"its {type(own).__name__}"
