"""Between live objects and snapshots: what there is to save, and putting it back, bit for bit.

``State.capture`` runs on the training thread at every step. It copies no data: it says which
tensors to copy (``Item``), and encodes all that is no tensor. ``State.restore`` copies from opened
snapshots into the live objects; nothing refers to the snapshots' memory afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..format.layout import Entry, Snapshot
from ..held import HeldValue
from .any_world import AnyWorld
from .assembly import Assembly, Fill, OpenedSnapshot, StateError, Step, run_all
from .beside import between, comm_hooks, modes
from .beside.attributes import Attributes
from .beside.plain_values import PlainValue, live_storages
from .leaves import Item, Leaf
from .loading.epochs import epoch_counts, goes_on, without_counts
from .loading.loader_state import LoaderState
from .module_state import ModuleState, fits
from .object_state import GeneratorState, ObjectState, ScalerState
from .optimizer_state import OptimizerState
from .section_tree import Section, each, flat, pairs
from .sections import RNG, TRAINED, ParameterNames, kind_of, sections
from .sharing import Fingerprint, LeafList, Share, SharedPart, checksum, cut, divide, is_shared
from .taken_over import LOADER, Taken, is_global, like, same_shares, take_over
from .values import Encoded

__all__ = ["Item", "OpenedSnapshot", "Share", "State", "StateError"]


_FIXED = frozenset((bool, int, float, str, type(None)))
GROUPS = ".param_groups."
BESIDE = frozenset((comm_hooks.KEY, modes.KEY, between.KEY))
"""Keys of what is saved beside the objects given."""


class Glimpse(NamedTuple):
    """The state of one object at a moment."""

    values: Encoded
    """The values that are no tensors."""
    tensors: dict[str, torch.Tensor]
    """Live tensors, not copies, by the names of their entries."""


class State:
    """The objects of one rank's checkpoint, and what was found out about them at earlier steps.

    Not thread-safe: it belongs to the training thread.
    """

    def __init__(
        self, objects: Mapping[str, Any], *, rank: int, share: Share | None = None
    ) -> None:
        """``objects``: "model", "optimizer", "loader" (one, or a list or dict of them),
        "extra.<name>", and "rng" for the process's random number generators, its value ignored.

        Raises TypeError for what cannot be saved.
        """
        self.rank = rank
        self.share = share if share is not None and len(share.ranks) > 1 else None
        self._found: list[LeafList] = []
        self._items: list[Item] = []
        self._shared: list[Leaf] = []
        self._shared_items: list[Item] = []
        self._divided: list[Entry] = []
        self._fingerprint = Fingerprint([])
        self._parts: dict[int, SharedPart] = {}
        self._together: frozenset[str] = frozenset()
        # Models first: the optimizer's parameters are called as they are there. Generators last:
        # what the others do may draw from them.
        ordered = sorted(objects, key=lambda key: (key == RNG, kind_of(key) != "model"))
        names = ParameterNames()
        self._tree = {key: sections(key, objects[key], names) for key in ordered}
        if (hooks := names.comm_hooks()) is not None:
            self._tree = {comm_hooks.KEY: hooks, **self._tree}
        if models := names.modules():
            self._tree[modes.KEY] = modes.Modes(models)
        self.between = between.Between()
        if any(isinstance(s, OptimizerState) for t in self._tree.values() for s in flat(t)):
            self._tree[between.KEY] = self.between
        # Found once: each save() goes through them several times.
        self._all: list[Section] = [s for tree in self._tree.values() for s in flat(tree)]
        self._optimizers = [s for s in self._all if isinstance(s, OptimizerState)]
        self._holders = [s for s in self._all if isinstance(s, ModuleState | OptimizerState)]
        """The sections that hold nearly all tensors."""
        self._loaders = [s for s in self._all if isinstance(s, LoaderState)]

    def release(self) -> None:
        """Release all objects; the State cannot be used afterwards. Sections refer back to it, so
        they would stay until the garbage collector runs."""
        vars(self).clear()

    def capture(self, *, trusting: bool = False) -> tuple[list[Item], dict[str, Encoded]]:
        """Return the state to save: tensors to copy, and everything else as JSON-able values.

        ``trusting``: tensors that are the same objects are not checked, which would take most of
        the time; ``still_there`` checks them later.

        Neither may be changed by the caller: parts of both are the same objects as last time, and
        the list of tensors is the same object where nothing changed.
        Raises TypeError that names the path of what cannot be saved.
        """
        holders = self._holders
        for section in holders:
            section.trusting = trusting
        try:
            values = {key: each(tree, lambda s: s.collect()) for key, tree in self._tree.items()}
        finally:
            for section in holders:
                section.trusting = False
        if readers := self._loaders:
            epochs = epoch_counts(values)
            for reader in readers:
                reader.note_epochs(epochs)
        lists = [leaves for section in self._all for leaves in section.leaves]
        if len(lists) == len(self._found) and all(
            leaves is found.leaves for leaves, found in zip(lists, self._found, strict=True)
        ):
            return self._items, values
        known = {id(found.leaves): found for found in self._found}
        all_found = [known.get(id(leaves)) or LeafList.of(leaves, self.share) for leaves in lists]
        items: list[Item] = []
        if self.share is not None:
            shared = [leaf for found in all_found for leaf in found.shared]
            if len(shared) != len(self._shared) or not all(map(is_, shared, self._shared)):
                self._divide(shared, self.share)
            items += self._shared_items
        for found in all_found:
            items += found.items if self.share is None else found.own
        self._found, self._items = all_found, items
        return items, values

    def _divide(self, shared: list[Leaf], share: Share) -> None:
        entries = [leaf.item.entry for leaf in shared]
        if entries != self._divided:
            holders = share.holders
            mine = (
                divide(entries, len(holders))[holders.index(self.rank)]
                if self.rank in holders
                else []
            )
            self._parts = {part.which: part for part in mine}
            self._divided = entries
        self._shared_items = [
            shared[i].item._replace(entry=part.entry, tensor=cut(shared[i].item.tensor, part))
            for i, part in self._parts.items()
        ]
        self._shared = shared
        self._fingerprint = Fingerprint([leaf.item[:2] for leaf in shared])

    def fingerprint(self, *, whole: bool, step: int | None = None) -> Callable[[], int]:
        """Return the function that computes the checksum of the shared tensors last captured, as
        this rank holds them; -1: none is shared. See ``Fingerprint.take``."""
        if self.share is None:
            return lambda: -1
        return self._fingerprint.take(whole=whole, step=step)

    def still_there(self) -> bool:
        """True if parameters and optimizer state lie where ``capture`` found them."""
        for section in self._holders:
            section.collect()
        known = {id(found.leaves) for found in self._found}
        return all(id(leaves) in known for each in self._holders for leaves in each.lasting)

    def collect(self, keys: Collection[str]) -> None:
        """Find what there is to save of these objects, so that ``capture`` need not.

        Raises as ``capture``.
        """
        for key, tree in self._tree.items():
            if key in keys:
                each(tree, lambda section: section.collect())

    def look_at_extra(self, *, foreign: bool = True) -> dict[str, Glimpse]:
        """Return what ``extra`` holds now, by key; but not the objects that a step begins with:
        loaders, samplers and generators.

        ``foreign``: look also at modules and at objects with code of the script's own. Such code
        may talk to other ranks, or wait for the GPU as a scaler does.
        """
        found, reads = {}, self._loaders
        for key, tree in self._tree.items():
            for section in flat(tree) if kind_of(key) == "extra" else ():
                if isinstance(section, ModuleState):  # running averages change in a forward pass
                    if foreign:
                        section.collect()
                        found[section.key] = Glimpse(None, _tensors(section.leaves[:1]))
                elif (
                    isinstance(section, ObjectState)
                    and type(section) in (ObjectState, ScalerState)
                    and not hasattr(section.found, "__iter__")
                    and (foreign or _looks_at_itself(section.found))
                ):
                    values = section.collect()
                    if reads:
                        values = without_counts({"d": {section.key: values}})
                    found[section.key] = Glimpse(values, _tensors(section.leaves))
        return found

    def schedulers(self) -> dict[str, LRScheduler]:
        """Return the learning-rate schedulers that are given, and that given objects hold."""
        return {key: each for section in self._all for key, each in _schedulers_of(section)}

    def look_at_settings(self) -> dict[str, Any]:
        """Return the settings in the parameter groups of all optimizers, and how often each
        learning-rate scheduler was stepped, by name."""
        found: dict[str, Any] = {key: _count(each) for key, each in self.schedulers().items()}
        for section in self._optimizers:
            for group in section.optimizer.param_groups:
                for name, value in group.items():
                    if name != "params":
                        known = found.setdefault(f"{section.key}{GROUPS}{name}", [])
                        known.append(_setting(value))
        return found

    def tensors_named(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the live tensors that were last found, of the entries with these names."""
        leaves = (leaf for section in self._all for part in section.leaves for leaf in part)
        items = (leaf.item for leaf in leaves)
        return {item.entry.name: item.tensor for item in items if item.entry.name in names}

    def names_trained_by(self, keys: Collection[str]) -> set[str]:
        """Return the names of the tensors, as they were last found, that the optimizers under
        these keys change."""
        trained = [
            s.optimizer for s in self._all if isinstance(s, OptimizerState) and s.key in keys
        ]
        there = live_storages(trained)
        leaves = (leaf for section in self._all for part in section.leaves for leaf in part)
        items = (leaf.item for leaf in leaves)
        return {i.entry.name for i in items if i.tensor.untyped_storage().data_ptr() in there}

    def is_recomputed(self, key: str) -> bool:
        """True for an object of ``extra`` that a next step may well change before its optimizer
        step, as an environment or a replay buffer; not for a scheduler, a module or a number."""
        for section in (
            s for k, tree in self._tree.items() if key.startswith(k) for s in flat(tree)
        ):
            if section.key == key and type(section) is ObjectState:
                if isinstance(section.found, PlainValue):
                    return not isinstance(section.get(), int | float | str | None)
                return not _looks_at_itself(section.found)
        return False

    def remarks(self) -> list[str]:
        """Return what the last ``capture`` found that cannot be saved, each once."""
        found = (getattr(section, "remarks", list) for section in self._all)
        return [text for remarks in found for text in remarks()]

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts of the gradients of all optimizers, with their names."""
        for section in self._optimizers:
            yield from section.gradients()

    def drop_gradients(self) -> None:
        """Leave no gradient, as in a process that has just started."""
        for section in self._all:
            if isinstance(section, ScalerState):
                section.found._per_optimizer_states.clear()  # that it has unscaled them
            if isinstance(section, OptimizerState):
                for group in section.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

    def trained_ends(self) -> list[torch.Tensor]:
        """Return the first and the last parameter that each group of all optimizers trains."""
        found: dict[int, torch.Tensor] = {}
        for section in self._optimizers:
            for group in section.optimizer.param_groups:
                trained = [p for p in group["params"] if p.requires_grad and p.is_leaf]
                found.update((id(p), p) for p in (*trained[:1], *trained[-1:]))
        return list(found.values())

    def schedulers_missing(self) -> list[str]:
        """Return the optimizers with a learning-rate scheduler, if ``extra`` has no scheduler."""
        sections = self._all
        inside = [getattr(section, "attributes", None) for section in sections]
        held = [s for attributes in inside if attributes is not None for s in attributes.sections()]
        if any(hasattr(getattr(s, "found", None), "get_last_lr") for s in (*sections, *held)):
            return []
        holders = [s for s in sections if isinstance(s, ObjectState) and [*_schedulers_of(s)]]
        if any("'last_epoch'" in repr(each.get()) for each in holders):
            return []
        return [
            each.key
            for each in self._optimizers
            if getattr(each.optimizer.step, "_wrapped_by_lr_sched", False)
        ]

    def shared_crc(self, *, restored: bool = False) -> int | None:
        """crc32 over names, shapes and data of all that is shared, whole; None if nothing is.

        Ranks that share must get the same. It reads every byte: seconds for tens of GB.
        ``restored``: nothing has changed since ``restore``. What it put together from the peers'
        parts is the same on all of them, so only names and shapes of that are summed up.
        """
        if self.share is None:
            return None
        # Of these alone: to ask a loader for its position now would begin its pass too early.
        self.collect([key for key in self._tree if kind_of(key) in TRAINED])
        found = (leaf for section in self._all for leaves in section.leaves for leaf in leaves)
        items = [leaf.item for leaf in found if is_shared(leaf, self.share)]
        same = self._together if restored else frozenset()
        return checksum((i.entry, None if i.entry.fqn in same else i.tensor) for i in items)

    def unshare(self) -> None:
        """Take every tensor as this rank's own from now on: the peers' are not the same."""
        self.share = None
        self._shared, self._shared_items, self._found = [], [], []

    def restore(self, sources: Sequence[OpenedSnapshot], taken: Taken | None = None) -> None:
        """Restore all objects from this rank's snapshot and those of the ranks it shares with.

        ``taken``: set if they are of a world of another size. Whether models and optimizers fit is
        known before anything is changed. Raises StateError that names the key.
        """
        origin = self.rank if taken is None else taken.origin
        saved = Assembly(sources, origin, resized=taken is not None)
        values = saved.own.values
        if not isinstance(values, dict):
            raise StateError("the snapshot holds no state")
        left = () if taken is None else taken.left
        if taken is not None and taken.positions:
            values = take_over(saved, sources, self._tree, taken.shares)
        if taken is not None:  # other ranks have other gradients
            left = (*left, comm_hooks.KEY)
        self._restore(saved, values, left)
        # If the peers have changed, each puts its state together from other parts.
        needs = self.share.needs(self.rank) if self.share is not None else ()
        same_peers = set(saved.own.needs) == set(needs)
        self._together = saved.together if same_peers else frozenset()

    def restore_any(self, saved: AnyWorld, left: Collection[str]) -> None:
        """Restore what another world saved, but not the objects under the keys ``left``.

        Raises StateError as ``restore`` does."""
        # Other ranks have other gradients.
        self._restore(saved, saved.own.values, (*left, comm_hooks.KEY))
        self._together = frozenset()

    def _restore(self, saved: Assembly, values: Any, left: Collection[str]) -> None:
        # An earlier version did not save them.
        left = (*left, *(key for key in BESIDE if key not in values or key not in self._tree))
        fits("state", [*values.keys() - BESIDE], [*self._tree.keys() - BESIDE])
        steps = [
            step
            for key, tree in self._tree.items()
            if key not in left
            for section, encoded in pairs(key, tree, values[key])
            for step in _plan(section, saved, saved.fitted(section, encoded))
        ]
        restored = epoch_counts(values)
        for reader in self._loaders:
            for keeper in reader.keepers:
                keeper.goes_on = lambda begun: goes_on(begun, restored, self._was_read)
        # Data first: the other steps hand out tensors that must be filled by then.
        run_all([step for step in steps if isinstance(step, Fill)])
        for step in steps:
            if not isinstance(step, Fill):
                step()

    def asked(self) -> tuple[set[str], set[str]]:
        """Return the names of all that the models' states hold here, and those of their buffers,
        each with its key, as a step has them."""
        names, buffers = set[str](), set[str]()
        for section in self._all:
            if isinstance(section, ModuleState) and kind_of(section.key) == "model":
                live = section.live_names()
                names |= {f"{section.key}.{name}" for name in live}
                buffers |= {f"{section.key}.{name}" for name in live - section.parameter_names()}
        return names, buffers

    def saved_names(self, values: Any) -> set[str]:
        """Return the names, as ``asked`` gives them, of all that was saved of these models."""
        return {
            f"{section.key}.{name}"
            for key, tree in self._tree.items()
            if key in values
            for section, encoded in pairs(key, tree, values[key])
            if isinstance(section, ModuleState) and kind_of(section.key) == "model"
            for name in encoded["d"]
        }

    def generators(self) -> set[str]:
        """Return the keys of the generators in ``extra``."""
        found = ((key, each) for key, tree in self._tree.items() for each in flat(tree))
        return {key for key, each in found if key != RNG and isinstance(each, GeneratorState)}

    def like(self, snapshot: Snapshot) -> bool:
        """Return True if a snapshot is of these objects, as far as models' names tell."""
        return like(self._tree, snapshot)

    def restore_positions(self, sources: Sequence[OpenedSnapshot], original: int) -> bool:
        """Restore the loaders alone, each from the rank of any world that had its share.

        False if these ranks did not save those of ``original`` shares. Raises StateError."""
        if is_global(self._tree[LOADER]):
            saved = Assembly(sources[:1], sources[0].snapshot.rank)
            if found := LOADER in saved.own.values:
                self._restore_loaders(saved, saved.own.values[LOADER])
            return found
        if not all(same_shares(source.snapshot, original) for source in sources):
            return False
        saved = Assembly(sources, sources[0].snapshot.rank)
        self._restore_loaders(saved, take_over(saved, sources, self._tree)[LOADER])
        return True

    def _restore_loaders(self, saved: Assembly, encoded: Encoded) -> None:
        for section, own in pairs(LOADER, self._tree[LOADER], encoded):
            for step in _plan(section, saved, own):
                step.run() if isinstance(step, Fill) else step()

    @property
    def notes(self) -> list[str]:
        """Remarks on oddities of the restored state, though it fits."""
        noting = (
            s
            for s in self._all
            if isinstance(s, OptimizerState | ObjectState | comm_hooks.CommHooks)
        )
        return [s.note for s in noting if s.note]

    def saved(self) -> list[str]:
        """Note that save() was called. Return what was noticed of loaders since the last call:
        what a restart would miss."""
        taken = sum(keeper.taken for reader in self._loaders for keeper in reader.keepers)
        return [text for reader in self._loaders for text in reader.saved(taken)]

    def _was_read(self, path: str) -> bool:
        """True unless it is of a plain value that the script has not read since it was restored."""
        name = path.split(".")[1]
        own = (getattr(s, "found", None) for s in self._all if s.key == f"extra.{name}")
        return not any(isinstance(each, PlainValue) and not each.was_read() for each in own)

    def unlike_saved(self) -> list[str]:
        """``ModuleState.unlike_saved`` of all models."""
        models = (s for s in self._all if isinstance(s, ModuleState))
        return [text for s in models if kind_of(s.key) == "model" for text in s.unlike_saved()]


def _looks_at_itself(found: object) -> bool:
    """True if its state_dict() is known to call no other code: a scheduler, or our own."""
    ours = type(found).__module__.startswith("robust_slurm.") and type(found) is not HeldValue
    return ours or isinstance(found, LRScheduler)


def _schedulers_of(section: Any) -> Iterator[tuple[str, LRScheduler]]:
    found, inside = getattr(section, "found", None), getattr(section, "attributes", None)
    if isinstance(found, LRScheduler):
        yield section.key.replace(".attributes", ""), found
    elif isinstance(inside, Attributes):
        for each in inside.sections():
            yield from _schedulers_of(each)
    elif isinstance(section, ObjectState):
        for name, value in list(getattr(found, "__dict__", {}).items()):
            if isinstance(value, LRScheduler):
                yield f"{section.key}.{name}", value


def _count(scheduler: Any) -> Any:
    inner = getattr(scheduler, "_schedulers", ())  # of one that is a chain of others
    return getattr(scheduler, "last_epoch", None), [_count(each) for each in inner]


def _setting(value: Any) -> Any:
    """Return what is equal as long as a setting does not change."""
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    return value if type(value) in _FIXED else repr(value)


def _tensors(leaves: list[list[Leaf]]) -> dict[str, torch.Tensor]:
    return {leaf.item.entry.name: leaf.item.tensor for found in leaves for leaf in found}


def _plan(section: Section, saved: Assembly, encoded: Encoded) -> list[Step]:
    try:
        return section.plan(saved, encoded)
    except StateError:
        raise
    except ValueError as err:
        raise StateError(f"{section.key}: {err}") from err
