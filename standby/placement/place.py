"""The order in which a job's nodes take its places. Pure.

The job's groups form a grid, ``fill`` lays it out over minipods, and each place gets a node of its
minipod: consecutive places in a minipod get nodes that follow each other in the given list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from standby.placement.choose import UNKNOWN
from standby.placement.fill import fill
from standby.placement.spread import ALPHA, Groups, Layout, check_alpha, groups, spread


class Cells(NamedTuple):
    """A job's groups as a grid."""

    rows: int
    """PP groups."""
    columns: int
    """DP groups."""
    depth: int
    """Places in both a PP and a DP group: 1 where a tensor group fits into a node."""
    at: tuple[tuple[int, int], ...]
    """Row and column of each place."""


def order(
    nodes: Sequence[str],
    mesh: Mapping[str, int],
    ranks_per_node: Layout,
    switches: Mapping[str, str],
    alpha: float = ALPHA,
    settled: bool = False,
) -> list[str]:
    """Return the nodes in the order in which they take the job's places, unused ones last.

    The given order is kept unless a better one is found. ``mesh``, ``ranks_per_node``: see
    ``spread.groups``; there are as many places as the mesh needs, or one per node without a mesh.
    ``settled``: moving nodes has a cost: the order changes only for a smaller weighted spread, and
    a node whose minipod suits its place stays there.
    Raises ValueError if a node is listed twice or there are too few nodes.
    """
    check_alpha(alpha)
    if len(set(nodes)) != len(nodes):
        raise ValueError(f"{len(nodes)} nodes, of which {len(set(nodes))} are different")
    places = _places(mesh, ranks_per_node, len(nodes))
    job = groups(mesh, ranks_per_node, places)
    pods: dict[str, list[str]] = {}
    for node in nodes:
        pods.setdefault(switches.get(node, UNKNOWN), []).append(node)
    best = [switches.get(node, UNKNOWN) for node in nodes[:places]]
    score = _score(job, best, alpha)
    if settled:
        score = (score[0], 0)
    changed = False
    for plan in _plans(job, pods, places, alpha):
        if (found := _score(job, plan, alpha)) < score:
            best, score, changed = plan, found, True
    if not changed:
        return list(nodes)
    stay = {p for p, pod in enumerate(best) if settled and switches.get(nodes[p], UNKNOWN) == pod}
    staying = {nodes[place] for place in stay}
    left = {pod: (n for n in of_pod if n not in staying) for pod, of_pod in pods.items()}
    placed = [nodes[p] if p in stay else next(left[pod]) for p, pod in enumerate(best)]
    taken = set(placed)
    return placed + [node for node in nodes if node not in taken]


def _score(job: Groups, minipod: Sequence[str], alpha: float) -> tuple[float, int]:
    found = spread(job, minipod)
    return found.weighted(alpha), found.total


def _places(mesh: Mapping[str, int], ranks_per_node: Layout, nodes: int) -> int:
    if not isinstance(ranks_per_node, int):
        places = len(ranks_per_node)
    elif mesh and ranks_per_node > 0:
        places = -(-prod(mesh.values()) // ranks_per_node)
    else:
        places = nodes
    if not 1 <= places <= nodes:
        raise ValueError(f"{nodes} nodes for a job of {places}")
    return places


def _plans(
    job: Groups, pods: Mapping[str, Sequence[str]], places: int, alpha: float
) -> Iterator[list[str]]:
    """Minipod of each place."""
    names = sorted(pods, key=lambda pod: -len(pods[pod]))  # the largest first
    cells = cells_of(job, places)
    if cells is not None:
        room = [len(pods[pod]) // cells.depth for pod in names]
        if sum(room) >= cells.rows * cells.columns:
            filled = fill(cells.rows, cells.columns, room, alpha)
            yield [names[filled.grid[row][column]] for row, column in cells.at]
            return
    # The groups form no grid, or tensor groups must be split: fill one group after another.
    every = [name for name in names for _ in pods[name]]
    for first, second in ((job.pp, job.dp), (job.dp, job.pp)):
        keys = [_of_place(first, places), _of_place(second, places)]
        line = sorted(range(places), key=lambda place: (keys[0][place], keys[1][place], place))
        plan = [""] * places
        for place, name in zip(line, every, strict=False):
            plan[place] = name
        yield plan


def cells_of(job: Groups, places: int) -> Cells | None:
    """Return the job as a grid, or None if a node is in two different groups of one kind.

    That happens if the groups do not divide the nodes evenly, as with DP 4 and 3 ranks per node.
    Places of one tensor group stay together: they are in as many DP groups side by side.
    """
    units = _of_place(job.tp, places)
    depth = {len(group) for group in job.tp}
    if len(depth) != 1 or any(len(of_place) != 1 for of_place in units):
        return None
    unit = [of_place[0] for of_place in units]
    lines: list[list[int]] = []
    sizes = []
    for some in (job.pp, job.dp):
        merged = dict.fromkeys(tuple(sorted({unit[p] for p in group})) for group in some)
        of_unit = _of_place(list(merged), len(job.tp))
        if any(len(found) != 1 for found in of_unit):
            return None
        lines.append([of_unit[u][0] for u in unit])
        sizes.append(len(merged))
    at = tuple(zip(*lines, strict=True))
    if len(set(at)) != sizes[0] * sizes[1] or len(set(Counter(at).values())) != 1:
        return None
    return Cells(sizes[0], sizes[1], depth.pop(), at)


def _of_place(some: Sequence[Sequence[int]], places: int) -> list[list[int]]:
    """Return, for each place, the numbers of its groups."""
    found: list[list[int]] = [[] for _ in range(places)]
    for number, group in enumerate(some):
        for place in group:
            found[place].append(number)
    return found
