"""An object that holds optimizers and is none: its own state_dict(), and what that leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..assembly import Assembly, StateError, Step
from ..leaves import Leaf, local_part
from ..object_state import ObjectState
from ..values import Encoded
from .attributes import Attributes


class HolderState(ObjectState):
    """A wrapper, or a set of optimizers, with state_dict() and load_state_dict()."""

    def __init__(
        self, key: str, found: Any, attributes: Callable[[HolderState], Attributes]
    ) -> None:
        super().__init__(key, found)
        self.attributes = attributes(self)

    @property
    def leaves(self) -> list[list[Leaf]]:
        """The tensors that ``collect`` found."""
        return [*super().leaves, *self.attributes.leaves]

    def storages(self) -> set[int]:
        """Return the addresses of the storages of what its state_dict() holds."""
        return {leaf.local.untyped_storage().data_ptr() for leaf in self._leaves.found}

    def remarks(self) -> list[str]:
        """Return what ``collect`` found that cannot be saved, each once."""
        return self.attributes.notes()

    def collect(self) -> Encoded:
        """Find the tensors (``leaves``), and return all else, encoded."""
        body = {"object": super().collect()}
        if (inside := self.attributes.collect(self._covers)) is not None:
            body["attributes"] = inside
        return {"d": body}

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Return the steps that restore it. Raises StateError."""
        body = encoded.get("d") if isinstance(encoded, dict) else None
        if not isinstance(body, dict) or "object" not in body:
            raise StateError(f"{self.key}: saved from another kind of object")
        inside = self.attributes.plan(saved, body.get("attributes"))
        return [*super().plan(saved, body["object"]), *inside]

    def _covers(self, inner: Optimizer) -> bool:
        """True if its state_dict() holds the state of an optimizer."""
        saved = {leaf.local.data_ptr() for leaf in self._leaves.found}
        held = [
            local_part(value).data_ptr() in saved
            for part in inner.state.values()
            for value in (part.values() if isinstance(part, Mapping) else ())
            if isinstance(value, torch.Tensor) and value.numel()
        ]
        return bool(held) and all(held)
