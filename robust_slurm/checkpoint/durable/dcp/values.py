"""A snapshot's plain values under the names that torch's DCP gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ...capture import values
from ...format.layout import Snapshot


class Described(NamedTuple):
    """Contents of a snapshot's values, flattened as DCP does it."""

    plain: Mapping[str, tuple[tuple[str | int, ...], Any]]
    """Name → (path, value) of all that is no tensor."""
    paths: Mapping[str, tuple[str | int, ...]]
    """fqn → path of tensors."""
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    aliases: Mapping[str, tuple[str, tuple[str | int, ...]]]
    """Name → (fqn, path) of tensors that have a second name, such as a tied weight."""


def describe_values(snapshot: Snapshot, tensors: Mapping[str, torch.Tensor]) -> Described:
    """Flatten the values of a snapshot as DCP's planner flattens a state.

    An object that cannot be decoded here (a type that this process does not have), or that has
    two values of one flat name, is left out: it stays in the part as JSON for the run itself.
    """
    by_fqn = {e.fqn: tensors[e.name] for e in snapshot.entries if e.name in tensors}
    seen: dict[int, tuple[str, torch.Tensor]] = {}

    def tensor(ref: values.TensorRef) -> torch.Tensor:
        found = by_fqn.get(ref.fqn)
        leaf = torch.empty(0, device="cpu") if found is None else found.view(found.shape)
        seen[id(leaf)] = (ref.fqn, leaf)
        return leaf

    plain: dict[str, tuple[tuple[str | int, ...], Any]] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    groups: list[tuple[str, tuple[str, ...]]] = []
    aliases: dict[str, tuple[str, tuple[str | int, ...]]] = {}
    fqns = {entry.fqn for entry in snapshot.entries}
    for key, encoded in dict(snapshot.values or {}).items():
        try:
            flat, mapping = flatten_state_dict({key: values.decode(encoded, tensor)})
        except (ValueError, ImportError):
            continue
        for name, value in flat.items():
            path = tuple(mapping[name])
            if isinstance(value, torch.Tensor):
                fqn = seen[id(value)][0] if id(value) in seen else ""
                if fqn == name:
                    paths[name] = path
                elif fqn and name not in fqns:
                    aliases.setdefault(name, (fqn, path))
            elif not values.holds_tensor(value):
                plain.setdefault(name, (path, value))
                if len(path) > 3 and path[-3] == "param_groups" and path[-1] == "params":
                    groups.append((name.rpartition(".")[0], tuple(map(str, value))))
    here = {fqn: path for fqn, path in paths.items() if fqn in by_fqn}
    return Described(plain, here, tuple(groups), aliases)
