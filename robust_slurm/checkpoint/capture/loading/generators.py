"""Find what decides the order of a loader's samples: generators, and counts of its samplers."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from .. import rng

DEPTH = 5  # attributes and items between a loader and a generator
MANY = 64  # items of a container that are looked at: more are data
_PLAIN = (bool, int, float, str, type(None))
_OPAQUE = (torch.Tensor, type, types.ModuleType, str, bytes, int, float)


def process_state() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators of this process."""
    return {name: state for name, state in rng.states().items() if not name.startswith("cuda")}


def generators(root: object) -> dict[str, Any]:
    """Return the generators that belong to an object, by their paths of attributes and items."""
    found: dict[str, Any] = {}
    _find(root, "", DEPTH, found, set())
    return found


def _find(at: object, path: str, depth: int, found: dict[str, Any], seen: set[int]) -> None:
    if id(at) in seen or isinstance(at, _OPAQUE):
        return
    seen.add(id(at))
    if rng.is_generator(at):
        found[path] = at
    elif depth:
        for name, part in _parts(at):
            _find(part, f"{path}.{name}" if path else name, depth - 1, found, seen)


def _parts(at: object) -> Iterator[tuple[str, Any]]:
    if isinstance(at, Mapping):
        if len(at) <= MANY:
            yield from ((str(name), part) for name, part in list(at.items()))
    elif isinstance(at, (list, tuple)):
        if len(at) <= MANY:
            yield from ((str(i), part) for i, part in enumerate(at))
    elif isinstance(at, types.MethodType):
        yield "self", at.__self__
    elif isinstance(at, partial):
        yield from (("func", at.func), ("args", at.args), ("keywords", at.keywords))
    elif isinstance(at, types.FunctionType):
        for name, cell in zip(at.__code__.co_freevars, at.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not set yet
                pass
    else:
        hidden = ("_iterator", "_robust")
        yield from ((k, v) for k, v in list(getattr(at, "__dict__", {}).items()) if k not in hidden)


def counts(loader: Any) -> dict[str, Any]:
    """Return the plain attributes of a loader's samplers, such as ``epoch``, by their paths."""
    found: dict[str, Any] = {}
    for path, sampler in _samplers(loader):
        for name, value in vars(sampler).items():
            if isinstance(value, _Restored):
                found[f"{path}.{name}"] = int(value)
            elif type(value) in _PLAIN:
                found[f"{path}.{name}"] = value
    return found


class _Restored(int):
    """A sampler's epoch that was restored, and that the script has not set since."""


def mark_epochs(loader: Any) -> None:
    """Have ``sets_epoch`` tell whether the script sets an epoch from now on, if to the same."""
    for _, sampler in _samplers(loader):
        held = vars(sampler)
        if type(held.get("epoch")) is int and hasattr(sampler, "set_epoch"):
            held["epoch"] = _Restored(held["epoch"])


def sets_epoch(loader: Any) -> bool:
    """Return True if the script has set the epoch of a sampler since ``mark_epochs``."""
    held = ((sampler, vars(sampler).get("epoch")) for _, sampler in _samplers(loader))
    return any(type(epoch) is int and hasattr(each, "set_epoch") for each, epoch in held)


def set_counts(loader: Any, state: Mapping[str, Any]) -> None:
    """Set such attributes. Names that are not there are left out."""
    for path, sampler in _samplers(loader):
        held = vars(sampler)
        held.update({n: state[f"{path}.{n}"] for n in held if f"{path}.{n}" in state})


def _samplers(loader: Any) -> Iterator[tuple[str, Any]]:
    seen: list[object] = []
    for name in ("batch_sampler", "sampler"):
        at, path = getattr(loader, name, None), name
        while hasattr(at, "__dict__") and not any(at is each for each in seen):
            seen.append(at)
            yield path, at
            at, path = vars(at).get("sampler"), f"{path}.sampler"


class LoaderGenerators:
    """The generators of one loader: in this process, and those that it owns."""

    def __init__(self, root: object) -> None:
        self._own = generators(root)

    def own(self) -> dict[str, Any]:
        """Return the states of those that belong to the loader."""
        return {path: rng.get(each) for path, each in self._own.items()}

    def put_own(self, state: Mapping[str, Any]) -> None:
        """Set these states. Generators that are not there any more are left out."""
        for path, each in state.items():
            if path in self._own:
                rng.put(self._own[path], each)


def forget_restored(dataset: Any) -> None:
    """Have a pass over a streaming dataset of Hugging Face's begin at its beginning.

    datasets begins every pass at the position that was restored, unless set_epoch() is called.
    """
    if getattr(dataset, "_starting_state_dict", None) is not None:
        dataset._starting_state_dict = None


def same(one: Any, other: Any) -> bool:
    """Return True if two states are equal."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "shape"):
        return bool((one == other).all())
    return bool(one == other)
