"""The sections of a state, in the structure of its objects: one, or a list or dict of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .assembly import Assembly, StateError, Step
from .leaves import Leaf
from .module_state import fits
from .values import Encoded


class Section(Protocol):
    """One object of the checkpoint."""

    key: str

    @property
    def leaves(self) -> list[list[Leaf]]:
        """The tensors that ``collect`` found; the same lists as long as they are the same."""

    def collect(self) -> Encoded:
        """Find the tensors, and return all else, encoded."""

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Check that the saved state fits. Return the steps that restore it."""


def flat(tree: Any) -> Iterator[Section]:
    if isinstance(tree, list | dict):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from flat(part)
    else:
        yield tree


def each(tree: Any, encoded: Callable[[Section], Encoded]) -> Encoded:
    """Return the sections' encoded states, in the structure of the sections."""
    if isinstance(tree, dict):
        return {"d": {name: each(part, encoded) for name, part in tree.items()}}
    if isinstance(tree, list):
        return [each(part, encoded) for part in tree]
    return encoded(tree)


def pairs(key: str, tree: Any, encoded: Encoded) -> Iterator[tuple[Section, Encoded]]:
    """Each section with what was saved of it."""
    if isinstance(tree, dict):
        parts = encoded.get("d") if isinstance(encoded, dict) else None
        if not isinstance(parts, dict):
            raise StateError(f"{key}: a dict of objects here, one object in the snapshot")
        fits(key, parts, tree)
        for name, part in tree.items():
            yield from pairs(f"{key}.{name}", part, parts[name])
    elif isinstance(tree, list):
        if not isinstance(encoded, list) or len(encoded) != len(tree):
            there = len(encoded) if isinstance(encoded, list) else 1
            raise StateError(f"{key}: {len(tree)} objects here, {there} in the snapshot")
        for i, part in enumerate(tree):
            yield from pairs(f"{key}.{i}", part, encoded[i])
    else:
        yield tree, encoded
