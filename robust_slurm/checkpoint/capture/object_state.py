"""The state of anything else: objects with a state_dict(), and generators."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from . import rng
from .assembly import Assembly, StateError, Step
from .leaves import Leaf, Leaves
from .values import Encoded, Save, decode, encode


class ObjectState:
    """An object with state_dict() and load_state_dict(): a scheduler, a loader, a scaler."""

    def __init__(self, key: str, found: Any) -> None:
        self.key = key
        self.found = found
        self.note = ""
        """Remark on an oddity of the restored state; empty if there is none."""
        self._leaves = Leaves(key, late=False, shareable=False)

    @property
    def leaves(self) -> list[list[Leaf]]:
        """The tensors that ``collect`` found."""
        return [self._leaves.found]

    def collect(self) -> Encoded:
        """Find the tensors (``leaves``), and return all else, encoded."""
        return collected(self.key, self.get(), self._leaves.add, self._leaves)

    def get(self) -> Any:
        """Return the object's state as plain values."""
        return self.found.state_dict()

    def put(self, state: Any) -> None:
        """Set its state."""
        self.found.load_state_dict(state)

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Decode the saved state. Return the step that restores it. Raises StateError."""
        state = decode(encoded, saved.fresh)
        self.note = self._other_schedule(state)
        return [partial(self._restore, state)]

    def _other_schedule(self, state: Any) -> str:
        """Return a note if a scheduler is given the state of another kind: it takes any."""
        if not (isinstance(self.found, LRScheduler) and isinstance(state, dict)):
            return ""
        fields = sorted(set(state) ^ set(self.get()))
        if not fields:
            return ""
        return (
            f"{self.key}: saved from another kind of scheduler than {type(self.found).__name__}, "
            f"or by another torch: only one of them has {', '.join(fields[:4])}"
        )

    def _restore(self, state: Any) -> None:
        try:
            self.put(state)
        except (KeyError, ValueError, TypeError, RuntimeError) as err:
            raise StateError(
                f"{self.key}: {type(self.found).__name__} does not take its saved state: "
                f"{type(err).__name__}: {err}"
            ) from err


class ScalerState(ObjectState):
    """A gradient scaler. Its tensors are saved as they are: its state_dict() waits for the device.

    That state_dict() holds plain numbers, so a snapshot may hold either.
    """

    @staticmethod
    def is_of(found: Any) -> bool:
        """True if it is torch's scaler, or one that keeps its state as torch's does."""
        base = torch.amp.GradScaler
        kind = type(found)
        return (
            isinstance(found, base)
            and kind.state_dict is base.state_dict
            and kind.load_state_dict is base.load_state_dict
        )

    def get(self) -> Any:
        """Return the object's state, with tensors for what the device changes."""
        idle = object.__new__(type(self.found))
        vars(idle).update(vars(self.found), _scale=None, _growth_tracker=None)
        state: dict[str, Any] = idle.state_dict()
        live = {"scale": "_scale", "_growth_tracker": "_growth_tracker"}
        found = {key: vars(self.found).get(name) for key, name in live.items() if key in state}
        return state | {key: value for key, value in found.items() if value is not None}

    def put(self, state: Any) -> None:
        """Set its state."""
        self.found.load_state_dict(for_loading(self.found, state))


def for_loading(found: Any, state: Any) -> Any:
    """The saved state of an object, as its load_state_dict() takes it."""
    if not ScalerState.is_of(found):
        return state
    return {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


class GeneratorState(ObjectState):
    """A random number generator of the script's own."""

    def __init__(self, key: str, found: Any) -> None:
        super().__init__(key, found)
        self._kept: dict[str, torch.Tensor] = {}

    def collect(self) -> Encoded:
        """Find the tensors (``leaves``), and return all else, encoded."""
        return collected(self.key, self.get(), self._add, self._leaves)

    def _add(self, path: str, tensor: torch.Tensor) -> Encoded:
        """Put a state, which is a new tensor every time, where the last one was: one leaf."""
        last = self._kept.get(path)
        if last is None or last.shape != tensor.shape or last.is_inference():
            last = self._kept[path] = tensor
        else:
            last.copy_(tensor)
        return self._leaves.add(path, last)

    def get(self) -> Any:
        return rng.get(self.found)

    def put(self, state: Any) -> None:
        rng.put(self.found, state)


class GlobalGenerators(GeneratorState):
    """The random number generators of the process."""

    def get(self) -> Any:
        return rng.states()

    def put(self, state: Any) -> None:
        rng.restore(state)


def collected(key: str, value: Any, add: Save, leaves: Leaves) -> Encoded:
    """Encode a state, its tensors as leaves."""
    leaves.begin()
    encoded = encode(value, key, lambda path, tensor: add(path[len(key) + 1 :], tensor))
    leaves.end()
    return encoded
