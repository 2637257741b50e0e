"""Find the losses that a placement of replicas survives, counted on the placement. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from robust_slurm.resizing.dimensions import GROUPS

from .placement import Holders, dimensions, group_ids

_Node = TypeVar("_Node", bound=Hashable)


def survives(
    holders: Holders,
    nodes: Sequence[str],
    mesh: Mapping[str, int],
    leaf: Mapping[str, str] | None = None,
) -> str:
    """Return the losses that leave a copy of each snapshot, and those that do not, as a part of a
    sentence: ``any 1 node, any 1 pipeline group; not 1 leaf switch``.

    Every single node, leaf switch and parallel group is tried, and every two nodes. Arguments as of
    ``place``, for any holders. A group is lost with all nodes it has ranks on.
    The death of processes alone is not counted as a loss: their snapshots outlive them.
    """
    numbers = {name: i for i, name in enumerate(dict.fromkeys(nodes))}
    node = [numbers[name] for name in nodes]
    together = _together(holders, node)
    kinds = [("node", {frozenset((i,)) for i in numbers.values()})]
    sizes = dimensions(mesh, len(nodes))
    names = [name for name, size in mesh.items() if size > 1] if sizes else []
    for d, name in enumerate(names):
        kinds.append((_group_name(name, names), _sets(group_ids(sizes, d), node)))
    known = {i: leaf[name] for name, i in numbers.items() if name in leaf} if leaf else {}
    if known:
        kinds.append(("leaf switch", _sets(known.values(), known)))
    good: list[str] = []
    fatal: list[str] = []
    everything = frozenset(numbers.values())
    for kind, sets in kinds:
        bad = [lost for lost in sets if _loses(lost, together)]
        if not bad:
            good.append(f"any 1 {kind}")
        elif len(numbers) > 1 and sets == {everything}:
            fatal.append(f"1 {kind} (it takes all nodes)")
        else:
            fatal.append(f"1 {kind}" + f" ({len(bad)} of {len(sets)})" * (len(sets) > 1))
    pairs = len(numbers) * (len(numbers) - 1) // 2
    if len(numbers) > 2:
        alive = pairs - _fatal_pairs(together)
        part = f"{alive} of {pairs} pairs of nodes"
        (good if alive else fatal).append(part if alive else "2 nodes")
    text = "; not ".join(part for part in (", ".join(good), ", ".join(fatal)) if part)
    return text if good else f"not {text}"


def copies(holders: Holders, nodes: Sequence[str]) -> dict[str, frozenset[str]]:
    """For each node the nodes that keep replicas of its ranks; itself where a rank has none."""
    found = _together(holders, nodes)
    return {name: frozenset(others) for name, others in found.items()}


def _sets(labels: Iterable[Hashable], node: Iterable[int]) -> set[frozenset[int]]:
    """The nodes of each label, without the labels."""
    found: dict[Hashable, set[int]] = {}
    for label, number in zip(labels, node, strict=True):
        found.setdefault(label, set()).add(number)
    return {frozenset(members) for members in found.values()}


def _together(holders: Iterable[int | None], node: Sequence[_Node]) -> dict[_Node, set[_Node]]:
    """For each owner's node the nodes of its replicas; the node itself where one has none."""
    found: dict[_Node, set[_Node]] = {}
    for owner, holder in enumerate(holders):
        found.setdefault(node[owner], set()).add(node[owner if holder is None else holder])
    return found


def _loses(lost: frozenset[int], together: Mapping[int, set[int]]) -> bool:
    """True if the loss of these nodes takes a snapshot and its replica."""
    return any(not together[number].isdisjoint(lost) for number in lost)


def _fatal_pairs(together: Mapping[int, set[int]]) -> int:
    """Number of pairs of nodes that take some snapshot and its replica with them."""
    alone = {at for at, others in together.items() if at in others}
    pairs = {
        frozenset((at, other))
        for at, others in together.items()
        for other in others
        if at not in alone and other not in alone
    }
    rest = len(together) - len(alone)
    return len(pairs) + len(alone) * rest + len(alone) * (len(alone) - 1) // 2


def _group_name(name: str, names: Sequence[str]) -> str:
    """Return the usual name of the dimension's groups, with its own where two are of one kind."""
    kind = GROUPS.get(name)
    if kind is None:
        return f"{name} group"
    alike = sum(GROUPS.get(other) == kind for other in names)
    return f"{kind} group" if alike == 1 else f"{kind} group ({name})"
