"""Choose the section for each object of a checkpoint, by its type and its key."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import is_
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer

from . import rng
from .beside.attributes import Attributes, optimizers_in
from .beside.comm_hooks import CommHooks, hook_states
from .beside.holder import HolderState
from .leaves import local_part
from .loading.loader_state import LoaderState
from .loading.passes import loaders
from .module_state import ModuleState
from .object_state import (
    GeneratorState,
    GlobalGenerators,
    ObjectState,
    ScalerState,
)
from .optimizer_state import OptimizerState

RNG = "rng"
TRAINED = ("model", "optimizer")
"""The sections whose tensors can be shared."""


class ParameterNames:
    """The names of the parameters of all models of a checkpoint."""

    def __init__(self) -> None:
        self._models: list[tuple[str, ModuleState]] = []
        self._others: list[ModuleState | ObjectState] = []
        # Weak: they refer back to this.
        self._optimizers: WeakValueDictionary[int, OptimizerState] = WeakValueDictionary()
        self._names: dict[torch.Tensor, str] = {}
        self._named: list[object] = []

    def add(self, prefix: str, model: ModuleState) -> None:
        """``prefix``: comes before the names of this model's parameters, with a dot."""
        self._models.append((prefix, model))

    def note(self, other: ModuleState | ObjectState) -> None:
        """Note a section that saves parameters too, but gives them no names: a module in ``extra``,
        or a model that is no module."""
        self._others.append(other)

    def elsewhere(self) -> set[int]:
        """Return the addresses of the tensors that the sections given to ``note`` save."""
        found = {
            local_part(parameter).data_ptr()
            for other in self._others
            if isinstance(other, ModuleState)
            for parameter in other.top.parameters()
        }
        leaves = (leaf for other in self._others for part in other.leaves for leaf in part)
        return found | {leaf.memory.address for leaf in leaves}

    def knows(self, optimizer: Optimizer) -> bool:
        """True if a section has this optimizer."""
        return id(optimizer) in self._optimizers

    def attributes(self, optimizer: OptimizerState) -> Attributes | None:
        """Return what looks after the state in the attributes of an optimizer; None for torch's
        own, which have none."""
        self._optimizers[id(optimizer.optimizer)] = optimizer
        if type(optimizer.optimizer).__module__.startswith("torch.optim."):
            return None
        make = partial(_inside, names=self)
        return Attributes(optimizer.key, optimizer.optimizer, make, saved=self.storages)

    def attributes_of_holder(self, holder: HolderState) -> Attributes:
        """Return what looks after what an object's state_dict() leaves out."""
        make, me = partial(_inside, names=self), ref(holder)

        def saved() -> set[int]:
            this = me()
            return self.storages() | (this.storages() if this is not None else set())

        return Attributes(holder.key, holder.found, make, saved=saved)

    def comm_hooks(self) -> CommHooks | None:
        """Return the section of all models' communication hooks; None if none may have state."""
        models = [model.top for _, model in self._models]
        if not any(True for _ in hook_states(models)):
            return None
        return CommHooks(models, partial(_inside, names=self), self.storages)

    def modules(self) -> list[ModuleState]:
        """Return the sections of all models that are modules."""
        return [model for _, model in self._models]

    def storages(self) -> set[int]:
        """Return the addresses of the storages that models and optimizers save."""
        return set(self._storages())

    def _storages(self) -> Iterator[int]:
        modules = [model for _, model in self._models]
        modules += [each for each in self._others if isinstance(each, ModuleState)]
        for module in modules:
            for tensor in (*module.top.parameters(), *module.top.buffers()):
                if tensor.layout is torch.strided:
                    yield local_part(tensor).untyped_storage().data_ptr()
        for optimizer in self._optimizers.values():
            yield from optimizer.storages()

    def __call__(self) -> dict[torch.Tensor, str]:
        """Parameter → its name among all models; the same dict as long as no tree changed."""
        named: list[object] = [model.names for _, model in self._models]
        if not self._named or not all(map(is_, named, self._named)):
            self._names = {}
            for prefix, model in self._models:
                for parameter, name in model.names.items():
                    self._names.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
            self._named = named
        return self._names


def sections(key: str, found: Any, names: ParameterNames) -> Any:
    """Return one section, or a list or dict of sections as the objects are given.

    Models are added to ``names``, and optimizers read it. Raises TypeError for what cannot be
    saved.
    """
    kind = kind_of(key)
    several = isinstance(found, list | tuple | dict)
    if several and not (kind == "extra" and _is_object(found)):
        if isinstance(found, dict):
            if len(set(map(str, found))) < len(found):
                raise TypeError(f"{key}: two of its keys are the same as text: {list(found)}")
            return {str(n): sections(f"{key}.{n}", part, names) for n, part in found.items()}
        return [sections(f"{key}.{i}", part, names) for i, part in enumerate(found)]
    trained = kind in TRAINED
    if isinstance(found, nn.Module):
        module = ModuleState(key, found, trained=trained)
        if kind == "model":
            names.add(key.removeprefix("model").lstrip("."), module)
        elif kind == "extra":
            names.note(module)
        return module
    if isinstance(found, Optimizer):
        return OptimizerState(
            key, found, names, names.elsewhere, trained=trained, attributes=names.attributes
        )
    if key == RNG:
        return GlobalGenerators(key, rng)
    if rng.is_generator(found):
        return GeneratorState(key, found)
    if hasattr(found, "state_dict") and hasattr(found, "load_state_dict"):
        if kind == "optimizer" and any(True for _ in optimizers_in(found)):
            return HolderState(key, found, names.attributes_of_holder)
        made = ScalerState if ScalerState.is_of(found) else ObjectState
        reads = kind == "loader" or bool(loaders(found))
        other = (LoaderState if reads else made)(key, found)
        if kind == "model":
            names.note(other)
        return other
    instead = ""
    if isinstance(found, torch.utils.data.DataLoader):
        instead = "; use torchdata's StatefulDataLoader, which takes the same arguments"
    raise TypeError(
        f"{key}: a {type(found).__name__} has no state_dict() and load_state_dict(){instead}"
    )


def _inside(key: str, found: Any, names: ParameterNames) -> Any:
    """Return the section of an attribute; None for an optimizer that has one already."""
    parts = list(found.values()) if isinstance(found, dict) else found
    parts = parts if isinstance(parts, list | tuple) else [found]
    if any(isinstance(part, Optimizer) and names.knows(part) for part in parts):
        return None
    return sections(key, found, names)


def kind_of(key: str) -> str:
    """Return "model", "optimizer", "loader", "extra" or "rng": the first word of the key."""
    return key.partition(".")[0]


def has_state(found: Any) -> bool:
    """True for an object to restore, and for a list or dict of nothing else; False for a plain
    value."""
    if _is_object(found) or not isinstance(found, list | tuple | dict):
        return _is_object(found)
    parts = list(found.values()) if isinstance(found, dict) else list(found)
    return bool(parts) and all(map(_is_object, parts))


def _is_object(found: Any) -> bool:
    """True for an object to restore; it may be a list or dict with a state of its own."""
    return (hasattr(found, "state_dict") and hasattr(found, "load_state_dict")) or (
        rng.is_generator(found)
    )
