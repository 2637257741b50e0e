"""State that a rank of a world of another size takes over: loaders' positions, share by share.

Loaders whose position is that of all ranks (``robust_slurm.data``) need no shares: every rank goes
on with it as its origin had it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from robust_slurm.resizing.shares import shares_of
from robust_slurm.resizing.stages import replica_of

from ..format.layout import Snapshot
from .assembly import Assembly, OpenedSnapshot, StateError
from .module_state import ModuleState
from .section_tree import pairs
from .sections import RNG, TRAINED, kind_of

LOADER = "loader"


class Taken(NamedTuple):
    """The rank of the other world whose snapshot a rank goes on with."""

    origin: int
    shares: tuple[int, ...]
    """The shares of the global batch that are this rank's now."""
    anew: bool = False
    """True if random generators stay as the script has made them, as this rank is new."""
    positions: bool = True
    """False: loaders stay as the script has made them."""

    @property
    def left(self) -> tuple[str, ...]:
        """Keys of what is not restored."""
        return (*([RNG] if self.anew else []), *([] if self.positions else [LOADER]))


def fixed(loader: Any, shares: Sequence[int], *, by_replica: bool = False) -> str:
    """Return why a world of another size could not go on with these loaders; "" if it could.

    A position is taken over only with its share: a loader that divides the data by the number of
    ranks would go on elsewhere in another world. ``by_replica``: the ranks of a replica compute
    the same shares; a loader whose plan does not know this gives each rank rows of its own.
    """
    if loader is None:
        return ""
    if is_global(loader):
        if by_replica and any(first != shares[0] for first in _first_shares(loader)):
            return "its loader gives the ranks of a pipeline different rows: its plan needs mesh="
        return ""
    if isinstance(loader, Mapping) and set(loader) == set(shares):
        return ""
    return (
        "its loader is not a dict with one for each share of the batch "
        "(robust_slurm.world(mesh).shares)"
    )


def is_global(found: Any) -> bool:
    """True for loaders, or their sections of a state, whose position is the same on all ranks."""
    if isinstance(found, Mapping):
        found = list(found.values())
    if isinstance(found, (list, tuple)):
        return bool(found) and all(map(is_global, found))
    return getattr(getattr(found, "found", found), "shared_position", False) is True


def ahead_of(loader: Any, step: int, began: int) -> list[str]:
    """Tell loaders that count their batches (``robust_slurm.data``) that ``step`` steps are done,
    ``began`` of them before the resume. Return what is wrong with saving their state now."""
    if isinstance(loader, Mapping):
        loader = list(loader.values())
    if isinstance(loader, (list, tuple)):
        return [text for each in loader for text in ahead_of(each, step, began)]
    note = getattr(loader, "saved_at", None) if is_global(loader) else None
    return [text for text in [note(step, began) if note else ""] if text]


def _first_shares(loader: Any) -> list[int]:
    """Return the first share of each of these loaders that says which are its rank's."""
    if isinstance(loader, Mapping):
        loader = list(loader.values())
    if isinstance(loader, (list, tuple)):
        return [first for each in loader for first in _first_shares(each)]
    return [*getattr(loader, "shares", ())][:1]


def by_share(snapshot: Snapshot) -> Mapping[str, Any]:
    """Return the positions that a rank saved, by share; {} if it saved none so."""
    held = snapshot.values.get(LOADER) if isinstance(snapshot.values, dict) else None
    found = held.get("d") if isinstance(held, dict) else None
    return found if isinstance(found, dict) else {}


def same_shares(snapshot: Snapshot, original: int, mesh: Mapping[str, int] | None = None) -> bool:
    """True if its rank saved the positions of just those of ``original`` shares that it had.

    ``mesh``: of its world, if the ranks of a replica computed a share together."""
    own = shares_of(*replica_of(snapshot.rank, snapshot.world, mesh or {}), original)
    return set(by_share(snapshot)) == set(map(str, own))


def like(tree: Mapping[str, Any], snapshot: Snapshot) -> bool:
    """See ``State.like``."""
    values = snapshot.values
    if not isinstance(values, dict) or not {k for k in tree if kind_of(k) in TRAINED} <= {*values}:
        return False
    try:
        trained = [key for key in tree if kind_of(key) in TRAINED]
        found = [each for key in trained for each in pairs(key, tree[key], values[key])]
    except StateError:
        return False
    models = ((each, saved) for each, saved in found if isinstance(each, ModuleState))
    return all(each.like(saved) for each, saved in models)


def take_over(
    saved: Assembly,
    sources: Sequence[OpenedSnapshot],
    tree: Mapping[str, Any],
    shares: Sequence[int] | None = None,
) -> Any:
    """Return the values that are restored: the origin's, with each share's loader from the rank
    that had it. Raises StateError, also if one of ``shares`` has no loader to read its data."""
    values = dict(saved.own.values)
    loaders = tree.get(LOADER)
    if loaders is None or is_global(loaders):
        return values
    if not isinstance(loaders, dict):
        raise StateError(f"{LOADER}: its position is not saved by shares: see docs/resize.md")
    if shares is not None and set(loaders) != set(map(str, shares)):
        asked = ", ".join(map(str, shares))
        raise StateError(f"{LOADER}: this rank has share {asked}, its loaders are of others")
    parts: dict[str, Any] = {}
    for source in sources:
        theirs = by_share(source.snapshot)
        for name in loaders:
            if name in theirs and name not in parts:
                parts[name] = theirs[name]
                saved.adopt(f"{LOADER}.{name}", source)
    if missing := [name for name in loaders if name not in parts]:
        raise StateError(f"{LOADER}: no snapshot has the position of share {', '.join(missing)}")
    values[LOADER] = {"d": parts}
    return values
