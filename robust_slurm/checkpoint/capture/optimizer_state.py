"""The state of an optimizer: by names of parameters, in the types that it really has.

``Optimizer.load_state_dict`` casts what it loads to the type of the parameter, which is not exact
for a 32-bit average of a 16-bit parameter. So where the optimizer uses torch's own methods its
state is read and written where it lies; otherwise its own methods are called, and what they cast
is put right afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from robust_slurm.text import counted

from .assembly import Assembly, StateError, Step
from .beside.own_parameters import OwnParameters
from .leaves import Batch, Leaf, Leaves, local_part
from .values import Encoded, TensorRef, decode, encode, ref_of

if TYPE_CHECKING:
    from .beside.attributes import Attributes

Names = Mapping[torch.Tensor, str]
TAGS = ("d", "t", "m", "od")
"""Keys of encoded values that are no part of their path."""
_IDS = "\0ids"
"""Key of the names by which an optimizer's own state_dict() calls its parameters."""
SIMPLE = frozenset((int, float, str, bool, type(None), torch.Tensor))
"""Values that cannot change without being replaced, but for the data of a tensor."""


class OptimizerState:
    """One optimizer among the objects of a checkpoint."""

    def __init__(
        self, key: str, optimizer: Optimizer, names: Callable[[], Names],
        elsewhere: Callable[[], Collection[int]] = frozenset, *, trained: bool,
        attributes: Callable[[OptimizerState], Attributes | None] = lambda section: None,
    ) -> None:  # fmt: skip
        """``names``: parameter → its name in the model, where it is in one; the same object as
        long as nothing changed. ``elsewhere``: addresses of parameters without a name that another
        object saves. ``trained``: it is the training's own, alike on all peers. ``attributes``:
        makes what looks after state in its attributes.
        """
        self.key = key
        self.optimizer = optimizer
        self.note = ""
        """Remark on an oddity of the restored state; empty if there is none."""
        self.trusting = False
        """``collect`` takes tensors that are the same objects for unchanged."""
        self._names, self._elsewhere = names, elsewhere
        self._known: Names | None = None
        self._state = Leaves(f"{key}.state", late=trained, shareable=trained)
        # Not late: schedulers set a learning rate that is a tensor, after the step.
        self._groups = Leaves(f"{key}.param_groups", late=False, shareable=False)
        self._own = OwnParameters(key, trained=trained)
        # What its own state_dict() holds beside these.
        self._more = Leaves(f"{key}.more", late=False, shareable=False)
        self._seen: list[Any] = []
        self._sizes: list[int] = []
        self._simple = False
        self._batch = Batch(())
        self._parameters: list[list[str | int]] = []
        self._encoded_state: Encoded = None
        self.attributes = attributes(self)

    @property
    def leaves(self) -> list[list[Leaf]]:
        """The tensors that ``collect`` found; the same lists as long as they are the same."""
        inside = self.attributes.leaves if self.attributes is not None else []
        return [*self.lasting, self._groups.found, self._more.found, *inside]

    @property
    def lasting(self) -> list[list[Leaf]]:
        """Those of ``leaves`` that stay the same objects from step to step."""
        return [self._state.found, self._own.found]

    def remarks(self) -> list[str]:
        """Return what ``collect`` found that cannot be saved, each once."""
        return self.attributes.notes() if self.attributes is not None else []

    def storages(self) -> Iterator[int]:
        """Yield the addresses of the storages that it saves."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        found = (leaf.local for part in (*self.lasting, self._more.found) for leaf in part)
        for tensor in chain(map(local_part, parameters), found):
            if tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__"):
                yield tensor.untyped_storage().data_ptr()

    def collect(self) -> Encoded:
        """Find the tensors (``leaves``), and return all else, encoded."""
        optimizer = self.optimizer
        kind = type(optimizer).__name__
        plain = is_plain_to_save(optimizer)
        groups = optimizer.param_groups
        state: Mapping[Any, Any] = optimizer.state if plain else {}
        more: dict[Any, Any] = {}
        whole: Any = None
        if not plain:
            whole = optimizer.state_dict()
            if (parts := self._by_parameter(whole)) is not None:
                groups, state, more = parts
                whole = None
        self._collect_state(groups, state)
        self._groups.begin()
        encoded = []
        for i, (group, names) in enumerate(zip(groups, self._parameters, strict=True)):
            body = {
                key: encode(value, f"{i}.{key}", self._groups.add)
                for key, value in group.items()
                if key != "params" and whole is None
            }
            encoded.append({"d": {**body, "params": names}})
        self._groups.end()
        body = {"state": self._encoded_state, "param_groups": encoded, "type": kind}
        if self._own.encoded is not None:
            body["parameters"] = self._own.encoded
        self._more.begin()
        for key, rest in (("more", more or None), ("whole", whole)):
            if rest is not None:
                body[key] = encode(rest, f"{self.key}.more", self._add_more)
        self._more.end()
        if self.attributes is not None:
            inside = self.attributes.collect(partial(self._covers, asked=not plain))
            if inside is not None:
                body["attributes"] = inside
        return {"d": body}

    def _add_state(self, path: str, tensor: torch.Tensor) -> Encoded:
        return self._state.add(path.removeprefix(f"{self.key}.state."), tensor)

    def _add_more(self, path: str, tensor: torch.Tensor) -> Encoded:
        return self._more.add(path.removeprefix(f"{self.key}.more."), tensor)

    def _covers(self, inner: Optimizer, *, asked: bool) -> bool:
        """True if what was collected holds all state of an optimizer in its attributes."""
        mine, theirs = self.optimizer.param_groups, inner.param_groups
        shared = len(mine) == len(theirs) and all(map(is_, mine, theirs))
        saved = {leaf.local.data_ptr() for leaf in (*self._state.found, *self._more.found)}
        return (asked or shared) and all(
            local_part(value).data_ptr() in saved
            for part in inner.state.values()
            for value in (part.values() if isinstance(part, Mapping) else ())
            if isinstance(value, torch.Tensor) and value.numel()
        )

    def _by_parameter(
        self, state: Any
    ) -> tuple[list[dict[str, Any]], Mapping[Any, Any], dict[Any, Any]] | None:
        """Return groups and state of an optimizer's own state_dict(), by parameter again, and what
        else it holds. None if it is not built as torch's: then it is taken whole."""
        live = [p for group in self.optimizer.param_groups for p in group["params"]]
        try:
            more = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
            ids = [i for group in state["param_groups"] for i in group["params"]]
            by_id = dict(zip(ids, live, strict=True))
            if ids != list(range(len(ids))):
                more[_IDS] = ids
            groups = [
                {**group, "params": [by_id[i] for i in group["params"]]}
                for group in state["param_groups"]
            ]
            by_parameter = {by_id.get(key, key): value for key, value in state["state"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        return groups, by_parameter, more

    def _collect_state(self, groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> None:
        names = self._names()
        lists = [group["params"] for group in groups]
        parts = list(state.values())
        dicts = [part for part in parts if type(part) is dict]
        sizes = [*map(len, lists), *map(len, dicts)]
        seen: list[Any] = list(chain.from_iterable(lists))
        seen += state
        seen += chain.from_iterable(map(dict.values, dicts))
        seen += chain.from_iterable(dicts)
        if (
            self._simple
            and len(dicts) == len(parts)
            and sizes == self._sizes
            and names is self._known
            and len(seen) == len(self._seen)
            and all(map(is_, seen, self._seen))
            and (self.trusting or self._batch.unchanged())
        ):
            return
        self._simple = False  # if what follows fails, it is done anew next time
        simple = len(dicts) == len(parts) and all(
            type(value) in SIMPLE for part in dicts for value in part.values()
        )
        self._parameters = names_in(groups, names)
        label = {
            parameter: name
            for group, known in zip(groups, self._parameters, strict=True)
            for parameter, name in zip(group["params"], known, strict=True)
        }
        self._state.begin()
        pairs: list[tuple[Any, Encoded]] = []
        for owner, part in state.items():
            name = label.get(owner, owner)
            if type(name) not in (str, int):
                what = f"a {type(owner).__name__}"
                if isinstance(owner, torch.Tensor):
                    what = "a parameter that is in none of its groups (was it replaced?)"
                raise TypeError(f"{self.key}: its state holds a part for {what}")
            pairs.append((name, encode(part, f"{self.key}.state.{name}", self._add_state)))
        if all(type(name) is str for name, _ in pairs):
            self._encoded_state = {"d": dict(pairs)}
        else:
            self._encoded_state = {"m": [list(pair) for pair in pairs]}
        self._state.end()
        self._own.collect(((name, p) for p, name in label.items()), self._elsewhere())
        self._batch = Batch([*self._state.found, *self._own.found])
        self._seen, self._sizes, self._known, self._simple = seen, sizes, names, simple

    def group_names(self) -> list[list[str | int]]:
        """Return each group's parameters by name, as ``names_in``."""
        return names_in(self.optimizer.param_groups, self._names())

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts of the gradients of its parameters, by name."""
        groups = self.optimizer.param_groups
        for group, known in zip(groups, names_in(groups, self._names()), strict=True):
            for parameter, name in zip(group["params"], known, strict=True):
                if parameter.grad is not None:
                    yield f"{self.key}: {name}", local_part(parameter.grad)

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Check that the saved state fits. Return the steps that restore it. Raises StateError."""
        try:
            state, groups = encoded["d"]["state"], encoded["d"]["param_groups"]
            parts = dict(state["d"]) if "d" in state else dict(state["m"])
            groups = [dict(group["d"]) for group in groups]
            saved_names = [group.pop("params") for group in groups]
            kind, own = encoded["d"].get("type"), encoded["d"].get("parameters")
            more, whole = encoded["d"].get("more"), encoded["d"].get("whole")
            inside = encoded["d"].get("attributes")
        except (KeyError, TypeError, ValueError):
            raise StateError(f"{self.key}: saved from something that is no optimizer") from None
        live = self.optimizer.param_groups
        names = names_in(live, self._names())
        self._compare(names, saved_names)
        self._compare_types(kind, groups)
        owners: dict[Any, torch.Tensor] = {
            name: parameter
            for known, group in zip(names, live, strict=True)
            for name, parameter in zip(known, group["params"], strict=True)
        }
        steps = self._own.plan(saved, own, owners)
        if own is None:
            self._look_for_unsaved(owners)
        after: list[Step] = []
        if inside is not None and self.attributes is None:
            raise StateError(f"{self.key}: saved from an optimizer with attributes of its own")
        if self.attributes is not None:
            after = self.attributes.plan(saved, inside)
        if (more, whole) != (None, None) and names != saved_names:
            raise StateError(f"{self.key}: saved with its parameters in another order")
        asked = partial(self._look_back, saved, encoded)
        if whole is not None:
            state = self._decode(saved, whole)
            return [*steps, partial(self._give, state), *after, asked]
        plain = is_plain_to_save(self.optimizer) and is_plain_to_load(self.optimizer)
        if more is not None or not plain:
            rest = self._decode(saved, more) if more is not None else {}
            load = partial(self._load, saved, parts, groups, owners, names, rest)
            return [*steps, load, *after, asked]
        made: dict[str, torch.Tensor] = {}
        state = {}
        for name, part in parts.items():
            owner = owners.get(name)
            here = self.optimizer.state.get(owner) if owner is not None else None
            key = name if owner is None else owner
            state[key] = self._renew(saved, part, here, owner, made, steps)
        for group, body in zip(live, groups, strict=True):
            new = self._renew(saved, {"d": body}, group, None, made, steps)
            steps.append(partial(group.update, new))
        return [*steps, partial(self._put, state), *after]

    def _decode(self, saved: Assembly, encoded: Encoded) -> dict[Any, Any]:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        like = next((p for p in parameters if local_part(p) is not p), None)
        found = decode(encoded, partial(saved.fresh, like=like))
        if not isinstance(found, dict):
            raise StateError(f"{self.key}: saved from something that is no optimizer")
        return found

    def _compare(self, live: list[list[str | int]], saved: list[list[str | int]]) -> None:
        """Raise StateError where the groups are of other parameters."""
        if len(live) != len(saved):
            raise StateError(
                f"{self.key}: saved with {counted(len(saved), 'parameter group')}, it has "
                f"{len(live)}: add what the script adds later (add_param_group) before resume()"
            )
        for i, (here, there) in enumerate(zip(live, saved, strict=True)):
            if set(here) != set(there):
                missing = sorted(map(str, set(here) - set(there)))[:3]
                unknown = sorted(map(str, set(there) - set(here)))[:3]
                raise StateError(
                    f"{self.key}: group {i} was saved with {len(there)} parameters, it has "
                    f"{len(here)}; only here: {', '.join(missing) or 'none'}; only in the "
                    f"snapshot: {', '.join(unknown) or 'none'}"
                )

    def _compare_types(self, saved: Any, groups: list[dict[str, Encoded]]) -> None:
        """Raise StateError where the state is that of another kind of optimizer."""
        here = type(self.optimizer).__name__
        self.note = ""
        if not isinstance(saved, str) or saved == here:
            return
        lacking = sorted(set(self.optimizer.defaults) - set(groups[0]))
        if lacking:
            raise StateError(
                f"{self.key}: saved from {saved}, it is {here}, of which nothing was saved "
                f"({', '.join(lacking[:4])})"
            )
        self.note = f"{self.key}: the state of {saved} is taken for {here}"

    def _look_for_unsaved(self, owners: Mapping[Any, torch.Tensor]) -> None:
        """Note parameters of which nothing was saved: an earlier version saved only their state."""
        if not self._names():  # what a model that is no module saves is known at its first save
            return
        own = OwnParameters(self.key, trained=False)
        own.collect(owners.items(), self._elsewhere())
        if own.found:
            self.note = (
                f"{self.key}: the step was saved by an earlier version, without "
                f"{counted(len(own.found), 'parameter')} of this optimizer that no model has: "
                "there they are as the script has made them"
            )

    @staticmethod
    def _renew(
        saved: Assembly, encoded: Encoded, here: Any, like: torch.Tensor | None,
        made: dict[str, torch.Tensor], steps: list[Step],
    ) -> Any:  # fmt: skip
        """Return the saved value; ``steps`` write existing tensors that fit in place."""

        def fresh(ref: TensorRef) -> torch.Tensor:
            # Once per name: what was one tensor in two places is one again.
            if ref.fqn not in made:
                made[ref.fqn] = saved.fresh(ref, like)
            return made[ref.fqn]

        def later(ref: TensorRef) -> torch.Tensor:
            """Like ``fresh``, but ``steps`` copy the data: most of the state is restored so."""
            if ref.fqn not in made:
                made[ref.fqn], fill = saved.later(ref, like)
                steps.append(fill)
            return made[ref.fqn]

        if not (isinstance(encoded, dict) and "d" in encoded):
            return decode(encoded, fresh)
        known = here if isinstance(here, dict) else {}
        new = {}
        for key, body in encoded["d"].items():
            ref, live = ref_of(body), known.get(key)
            if ref is not None and ref.fqn not in made and isinstance(live, torch.Tensor):
                try:
                    steps.append(saved.into(live, ref, like))
                except StateError:  # of another shape: replaced
                    new[key] = later(ref)
                else:
                    new[key] = made[ref.fqn] = live
            else:
                new[key] = decode(body, fresh) if ref is None else later(ref)
        return new

    def _put(self, state: dict[Any, Any]) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update(state)

    def _load(
        self, saved: Assembly, parts: dict[Any, Encoded], groups: list[dict[str, Encoded]],
        owners: dict[Any, torch.Tensor], names: list[list[str | int]], more: dict[Any, Any],
    ) -> None:  # fmt: skip
        """Pass the state to the optimizer's own load_state_dict, and undo its casts."""
        own_ids = more.pop(_IDS, None) or range(len(owners))
        ids = dict(zip(owners, own_ids, strict=True))
        state = {}
        for name, part in parts.items():
            like = owners.get(name)
            state[ids.get(name, name)] = decode(part, partial(saved.fresh, like=like))
        whole = [
            {**decode({"d": group}, saved.fresh), "params": [ids[name] for name in known]}
            for group, known in zip(groups, names, strict=True)
        ]
        # Copies of the dicts: load_state_dict() may change what it is given.
        given = {key: dict(part) if isinstance(part, dict) else part for key, part in state.items()}
        self._give({**more, "state": given, "param_groups": whole})
        for name, parameter in owners.items():
            live_state = getattr(self.optimizer, "state", {})
            exact, here = state.get(ids[name]), live_state.get(parameter)
            if isinstance(exact, dict) and isinstance(here, dict):
                for key, tensor in exact.items():
                    live = here.get(key)
                    if (
                        isinstance(tensor, torch.Tensor)
                        and isinstance(live, torch.Tensor)
                        and (live.dtype != tensor.dtype and live.shape == tensor.shape)
                    ):
                        here[key] = tensor.to(live.device)

    def _give(self, state: dict[Any, Any]) -> None:
        try:
            self.optimizer.load_state_dict(state)
        except Exception as err:  # the script's own code
            raise StateError(
                f"{self.key}: {type(self.optimizer).__name__} does not take its saved state: "
                f"{type(err).__name__}: {err}"
            ) from err

    def _look_back(self, saved: Assembly, encoded: Encoded) -> None:
        """Note what the optimizer's own load_state_dict() has left out, or made another."""
        now = self.collect()
        lost = [
            f"{key}{path}"
            for key in ("param_groups", "state", "more", "whole")
            for path in differing(encoded["d"].get(key), now["d"].get(key))
        ]
        leaves = (leaf for part in (*self.lasting, self._more.found) for leaf in part)
        # In another world a rank has other parts of a tensor.
        for item in (leaf.item for leaf in leaves if not saved.resized):
            raw = item.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            with contextlib.suppress(StateError):
                there = saved.whole(item.entry.fqn)
                if not torch.equal(raw, there.reshape(-1).view(torch.uint8)):
                    lost.append(item.entry.fqn.removeprefix(f"{self.key}."))
        if lost:
            self.note = (
                f"{self.key}: load_state_dict() of {type(self.optimizer).__name__} does not give "
                f"back what its state_dict() saved: {', '.join(lost[:3])} differs after resume()"
            )


def differing(saved: Encoded, now: Encoded, path: str = "") -> list[str]:
    """Return the paths at which two encoded values differ, but for the data of tensors."""
    if isinstance(saved, dict) and isinstance(now, dict) and saved.keys() == now.keys():
        if "T" in saved:
            return [] if _name(saved) == _name(now) else [path]
        return [
            each
            for key in saved
            for each in differing(saved[key], now[key], path if key in TAGS else f"{path}.{key}")
        ]
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        pairs = enumerate(zip(saved, now, strict=True))
        return [each for i, (a, b) in pairs for each in differing(a, b, f"{path}.{i}")]
    return [] if type(saved) is type(now) and saved == now else [path]


def _name(encoded: Encoded) -> Any:
    ref = ref_of(encoded)
    return ref.fqn if ref is not None else None


def is_plain_to_save(optimizer: Optimizer) -> bool:
    """True if state_dict() lists ``state`` and ``param_groups``, nothing else."""
    return (
        type(optimizer).state_dict is Optimizer.state_dict
        and "state_dict" not in vars(optimizer)
        and not optimizer._optimizer_state_dict_pre_hooks
        and not optimizer._optimizer_state_dict_post_hooks
    )


def is_plain_to_load(optimizer: Optimizer) -> bool:
    """True if load_state_dict() sets ``state`` and ``param_groups``, nothing else."""
    return (
        type(optimizer).load_state_dict is Optimizer.load_state_dict
        and "load_state_dict" not in vars(optimizer)
        and not optimizer._optimizer_load_state_dict_pre_hooks
        and not optimizer._optimizer_load_state_dict_post_hooks
    )


def names_in(groups: list[dict[str, Any]], names: Names) -> list[list[str | int]]:
    """Return each group's parameters by name, or by number in the optimizer if they have none."""
    found: list[list[str | int]] = []
    at = 0
    for group in groups:
        known = [names.get(p, at + i) for i, p in enumerate(group["params"])]
        at += len(known)
        found.append(known)
    return found
