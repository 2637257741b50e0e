"""State that an object keeps in its attributes, and that no state_dict() of it has.

An optimizer of the script's own may count steps in an attribute, hold 32-bit master weights or an
average there, or another optimizer. An attribute that has changed since the start is state, and is
saved; one that never changes is a setting (a rank, a period), which the script makes anew.
"""

from __future__ import annotations

import copy
import enum
import itertools
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .. import rng
from ..assembly import Assembly, StateError, Step
from ..leaves import Leaf, Leaves, local_part
from ..section_tree import each as collect_each
from ..section_tree import flat, pairs
from ..values import Encoded, decode, encode
from .plain_values import renewed

TORCHS = frozenset(
    (
        "state",
        "param_groups",
        "step",
        "_opt_called",
        "grad_scale",
        "found_inf",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
    )
)
"""Attributes of an optimizer that torch, its schedulers and its scaler set: no state, or saved
elsewhere."""
_PARAMETER = "\0parameter"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_NO_STATE = (FunctionType, MethodType, BuiltinFunctionType, partial, type, ModuleType)
_DEPTH = 6  # of containers and objects in each other
_MANY = 10_000  # values of one attribute that are looked at


class Attributes:
    """The attributes of one object. Belongs to the training thread."""

    def __init__(
        self, key: str, owner: Any, make: Callable[[str, Any], Any], *,
        saved: Callable[[], Collection[int]], depth: int = 1,
        parameters: Callable[[], Sequence[torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        """``make``: returns the section of an object with state, or a list or dict of them, or None
        if another section has it. ``saved``: returns the addresses of the storages that other
        sections save. ``depth``: of objects without a state_dict() that are looked into.
        ``parameters``: returns those that values may refer to, the optimizer's if None."""
        self.key, self.owner = f"{key}.attributes", owner
        self._saved = saved
        self._parameters = parameters or partial(_parameters_of, owner)
        self._own = TORCHS if isinstance(owner, Optimizer) else frozenset[str]()
        self._leaves = Leaves(self.key, late=False, shareable=False)
        self._changed: set[str] = set()
        self._sections: dict[str, Any] = {}
        self._inner: dict[str, Attributes] = {}
        for name, value in self._named():
            if _has_state(value):
                if (tree := make(f"{self.key}.{name}", value)) is not None:
                    self._sections[name] = tree
            elif depth and has_attributes(value):
                self._inner[name] = Attributes(
                    f"{self.key}.{name}", value, make,
                    saved=saved, depth=depth - 1, parameters=self._parameters,
                )  # fmt: skip
        addresses = _Storages(saved)
        self._first = {name: _look(value, addresses) for name, value in self._named()}
        held = {**self._sections, **self._inner}
        self._objects = {name: value for name, value in self._named() if name in held}
        self._found: list[str] = []
        self._said: set[str] = set()
        self._notes: list[str] = []

    def notes(self) -> list[str]:
        """Return what ``collect`` found that cannot be saved, each once."""
        found, self._notes = self._notes, []
        for inner in self._inner.values():
            found += inner.notes()
        for section in self.sections():
            found += section.remarks() if hasattr(section, "remarks") else []
        return found

    def sections(self) -> Iterator[Any]:
        """Yield the sections of the objects with state among them."""
        for tree in self._sections.values():
            yield from flat(tree)

    @property
    def leaves(self) -> list[list[Leaf]]:
        """The tensors that ``collect`` found."""
        found = [self._leaves.found]
        for name in self._found:
            found += [part for s in flat(self._sections[name]) for part in s.leaves]
        return found + [part for inner in self._inner.values() for part in inner.leaves]

    def _named(self) -> list[tuple[str, Any]]:
        found = _attributes(self.owner).items()
        return [(k, v) for k, v in found if k not in self._own and not k.startswith("_optimizer_")]

    def collect(self, covered: Callable[[Any], bool] = lambda optimizer: False) -> Encoded:
        """Find the tensors, and return all else, encoded; None if nothing has changed.

        ``covered``: True for an optimizer whose state the owner's section has saved."""
        addresses = _Storages(self._saved)
        values: dict[str, Encoded] = {}
        self._found = []
        self._leaves.begin()
        for name, value in self._named():
            tree, inner = self._sections.get(name), self._inner.get(name)
            if value is not self._objects.get(name, value):
                self._note(name, "the object that it was at first was replaced")
                continue
            if inner is not None:
                if (encoded := inner.collect(covered)) is not None:
                    values[name] = {"inner": encoded}
                continue
            held = [] if tree is None else [getattr(s, "optimizer", None) for s in flat(tree)]
            if any(each is not None for each in held):
                if all(one is not None and covered(one) for one in held):
                    continue
            elif name not in self._changed:
                if _look(value, addresses) == self._first.get(name):
                    continue
                self._changed.add(name)
            if tree is not None:
                values[name] = {"state": collect_each(tree, lambda section: section.collect())}
                self._found.append(name)
            elif (encoded := self._encoded(name, value)) is not None:
                values[name] = {"value": encoded[0]}
        self._leaves.end()
        return {"d": {name: {"d": body} for name, body in values.items()}} if values else None

    def _encoded(self, name: str, value: Any) -> list[Encoded] | None:
        names = {id(p): n for n, p in enumerate(self._parameters())}
        try:
            return [encode(_swapped(value, names), f"{self.key}.{name}", self._add)]
        except TypeError as err:
            self._note(name, str(err))
            return None

    def _note(self, name: str, why: str) -> None:
        if name not in self._said:
            self._said.add(name)
            path = self.key.replace(".attributes", "")
            self._notes.append(
                f"{path}.{name} of {type(self.owner).__name__} changes as it is used and cannot be "
                f"saved: a restart goes on with that of its start ({why}). Return it from "
                "state_dict(), and take it back in load_state_dict()"
            )

    def _add(self, path: str, tensor: torch.Tensor) -> Encoded:
        return self._leaves.add(path.removeprefix(f"{self.key}."), tensor)

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Return the steps that restore them. Raises StateError."""
        values = encoded.get("d", {}) if isinstance(encoded, dict) else {}
        parameters = self._parameters()
        sharded = [p for p in parameters if local_part(p) is not p]
        fresh = partial(saved.fresh, like=sharded[0] if sharded else None)
        steps: list[Step] = []
        for name, wrapped in values.items():
            ((kind, body),) = wrapped["d"].items()
            tree, inner = self._sections.get(name), self._inner.get(name)
            here = "state" if tree is not None else "inner" if inner is not None else "value"
            if kind != here:
                raise StateError(f"{self.key}.{name}: saved from another kind of object")
            self._changed.add(name)
            if inner is not None:
                steps += inner.plan(saved, body)
            elif tree is not None:
                for section, part in pairs(f"{self.key}.{name}", tree, body):
                    steps += section.plan(saved, part)
            else:
                value = _restored(decode(body, fresh), parameters)
                steps.append(partial(self._put, name, value))
        return steps

    def _put(self, name: str, value: Any) -> None:
        here = getattr(self.owner, name, None)
        setattr(self.owner, name, renewed(here, value)[0])


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", ())
    return [parameter for group in groups for parameter in group["params"]]


def _attributes(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too."""
    slots = [name for base in type(owner).__mro__ for name in _names(vars(base).get("__slots__"))]
    found = {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return {**found, **getattr(owner, "__dict__", {})}


def _names(slots: Any) -> Sequence[str]:
    return (slots,) if isinstance(slots, str) else tuple(slots or ())


def optimizers_in(found: Any, depth: int = 3) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers in the attributes of an object, by path, and in theirs."""
    for name, value in getattr(found, "__dict__", {}).items():
        parts = [("", value)]
        if isinstance(value, Mapping):
            parts = [(f"[{k!r:.20}]", part) for k, part in value.items()]
        elif isinstance(value, list | tuple):
            parts = [(f"[{i}]", part) for i, part in enumerate(value)]
        for place, part in parts:
            if isinstance(part, Optimizer) and depth:
                yield f"{name}{place}", part
                for path, other in optimizers_in(part, depth - 1):
                    yield f"{name}{place}.{path}", other


def _has_state(value: Any) -> bool:
    """True for an object that a section can hold, and for a list or dict of nothing else."""
    if isinstance(value, list | tuple | dict):
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        return bool(parts) and all(map(_is_object, parts))
    return _is_object(value)


def _is_object(value: Any) -> bool:
    if isinstance(value, list | tuple | dict | type):
        return False
    both = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return both or rng.is_generator(value)


def has_attributes(value: Any) -> bool:
    """True for an object whose attributes may be state: not of a type of Python's own."""
    kind = type(value)
    if isinstance(value, (*_NO_STATE, torch.Tensor, enum.Enum)):
        return False
    if not (hasattr(value, "__dict__") or hasattr(kind, "__slots__")):
        return False
    package = kind.__module__.partition(".")[0]
    return package not in sys.stdlib_module_names and package not in ("numpy", "pybind11_builtins")


class _Storages:
    """The addresses of storages that other sections save, found when they are asked for."""

    def __init__(self, find: Callable[[], Collection[int]]) -> None:
        self._find = find
        self._found: Collection[int] | None = None

    def __contains__(self, address: int) -> bool:
        if self._found is None:
            self._found = self._find()
        return address in self._found


class _Same:
    """A tensor as it was: equal to itself as long as torch counts no write to it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = None if tensor.is_inference() else local_part(tensor)._version

    def __eq__(self, other: object) -> bool:
        mine = self._tensor()
        theirs = other._tensor() if isinstance(other, _Same) else None
        return mine is not None and mine is theirs and self._version == other._version  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


def _look(value: Any, saved: _Storages) -> Any:
    """Return a description of a value that is equal as long as nothing in it changes; of a tensor
    in ``saved`` storages only that it is one."""
    left = [_MANY]

    def look(value: Any, depth: int) -> Any:
        kind = type(value)
        left[0] -= 1
        if kind in _PLAIN:
            return kind, repr(value)
        if isinstance(value, torch.Tensor):
            return None if _is_saved(value, saved) else _Same(value)
        if isinstance(value, enum.Enum):
            return kind, value.name
        if isinstance(value, itertools.count):
            return repr(value)
        if isinstance(value, FunctionType):  # a count in a closure
            cells = value.__closure__ or ()
            held = [getattr(cell, "cell_contents", None) for cell in cells]
            return [look(part, depth) for part in held if type(part) in _PLAIN]
        if depth == 0 or left[0] < 0 or isinstance(value, _NO_STATE):
            return None
        if isinstance(value, Optimizer):  # its param_groups may be the owner's
            return [look(part, depth - 1) for part in value.state.values()]
        if rng.is_generator(value):
            state = rng.get(value)
            return state.tolist() if isinstance(state, torch.Tensor) else repr(state)
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
            return [look(tensor, depth - 1) for tensor in tensors]
        if isinstance(value, Mapping):
            return kind, [(look(k, depth - 1), look(v, depth - 1)) for k, v in value.items()]
        if isinstance(value, list | tuple | deque):
            return kind, [look(part, depth - 1) for part in value]
        if isinstance(value, set | frozenset):
            plain = all(type(part) in _PLAIN for part in value)
            return kind, sorted(map(repr, value)) if plain else len(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return str(value.dtype), value.shape, value.tobytes()
        return look(_attributes(value), depth - 1) if has_attributes(value) else None

    return look(value, _DEPTH)


def _is_saved(tensor: torch.Tensor, saved: _Storages) -> bool:
    if not tensor.numel() or tensor.layout is not torch.strided:
        return not tensor.numel()
    try:
        return local_part(tensor).untyped_storage().data_ptr() in saved
    except RuntimeError:  # a subclass of several tensors has no storage
        return False


def _swapped(value: Any, names: Mapping[int, int]) -> Any:
    """Return the value with a stand-in for each parameter in it."""
    if isinstance(value, torch.Tensor):
        return (_PARAMETER, names[id(value)]) if id(value) in names else value
    return _mapped(value, partial(_swapped, names=names))


def _restored(value: Any, parameters: Sequence[torch.Tensor]) -> Any:
    """Return the value with parameters for their stand-ins. Raises StateError."""
    if type(value) is tuple and len(value) == 2 and _is_stand_in(value[0]):
        if not 0 <= value[1] < len(parameters):
            raise StateError(f"parameter {value[1]} was saved, there is none here")
        return parameters[value[1]]
    return _mapped(value, partial(_restored, parameters=parameters))


def _is_stand_in(value: Any) -> bool:
    return type(value) is str and value == _PARAMETER


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict):
        new = copy.copy(value)
        new.clear()
        new.update((change(k), change(v)) for k, v in value.items())
        return new
    if kind in (list, tuple):
        return kind(map(change, value))
    return value
