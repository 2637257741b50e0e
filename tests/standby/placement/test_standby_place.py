"""The placement of a job's nodes: heuristic, bound, exact program, order, and the baselines."""

import random
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.common import Results
from bench.placement.__main__ import CASES
from bench.placement.baselines import BASELINES
from bench.placement.exact import arnold, columns_bound, exact
from bench.placement.highs import Program
from standby.placement.bound import bound
from standby.placement.choose import UNKNOWN
from standby.placement.fill import Filled, fill, measured
from standby.placement.place import cells_of, order
from standby.placement.spread import groups, spread, weighted

ALPHAS = st.sampled_from([0.0, 0.3, 0.5, 1.0])


@st.composite
def grids(
    draw: st.DrawFn, side: int = 6, pods: int = 5, cells: int = 36
) -> tuple[int, int, list[int]]:
    """Rows, columns, and room that is enough."""
    rows = draw(st.integers(1, side))
    columns = draw(st.integers(1, min(side, cells // rows)))
    room = draw(st.lists(st.integers(0, rows * columns), min_size=1, max_size=pods))
    room[0] += max(0, rows * columns - sum(room))
    return rows, columns, draw(st.permutations(room))


def _holds(found: Filled, rows: int, columns: int, room: list[int]) -> None:
    """Every cell is placed, no minipod has too many, and the spreads are the true ones."""
    assert [len(row) for row in found.grid] == [columns] * rows
    used = Counter(pod for row in found.grid for pod in row)
    assert all(0 < n <= room[pod] for pod, n in used.items())
    assert found == measured(found.grid)


@settings(deadline=None)
@given(grids(), ALPHAS)
def test_heuristic_places_all_and_is_never_below_the_bound(
    grid: tuple[int, int, list[int]], alpha: float
) -> None:
    rows, columns, room = grid
    found = fill(rows, columns, room, alpha)
    _holds(found, rows, columns, room)
    assert found.weighted(alpha) >= bound(rows, columns, room, alpha)
    assert found == fill(rows, columns, room, alpha)


@settings(deadline=None, max_examples=60)
@given(grids(side=4, pods=3, cells=9), ALPHAS)
def test_against_everything_there_is(grid: tuple[int, int, list[int]], alpha: float) -> None:
    rows, columns, room = grid
    best, least = float("inf"), dict[int, int]()
    for line in product(range(len(room)), repeat=rows * columns):
        if all(n <= room[pod] for pod, n in Counter(line).items()):
            lines = [list(line[r * columns : (r + 1) * columns]) for r in range(rows)]
            found = measured(lines)
            best = min(best, found.weighted(alpha))
            least[found.pp] = min(found.dp, least.get(found.pp, found.dp))
    assert (
        bound(rows, columns, room, alpha)
        <= best
        <= fill(rows, columns, room, alpha).weighted(alpha)
    )
    limits = columns_bound(rows, columns, room)
    assert all(limits[p] <= d for p, d in least.items())
    solved = exact(rows, columns, room, alpha, limit_s=60)
    _holds(solved.filled, rows, columns, room)
    assert solved.filled.weighted(alpha) == best == solved.bound


@settings(deadline=None, max_examples=30)
@given(grids(), ALPHAS)
def test_heuristic_is_never_better_than_the_exact_program(
    grid: tuple[int, int, list[int]], alpha: float
) -> None:
    rows, columns, room = grid
    solved = exact(rows, columns, room, alpha, limit_s=5)
    _holds(solved.filled, rows, columns, room)
    least = bound(rows, columns, room, alpha)
    assert least <= solved.bound <= solved.filled.weighted(alpha)
    assert fill(rows, columns, room, alpha).weighted(alpha) >= solved.filled.weighted(alpha)


def test_the_exact_program_betters_the_heuristic() -> None:
    """A case that the heuristic does not find, so that the programs are really solved."""
    rows, columns, room = EXACT_ONLY
    near = fill(rows, columns, room, 0.5)
    solved = exact(rows, columns, room, 0.5, limit_s=60)
    assert solved.filled.weighted(0.5) < near.weighted(0.5)
    assert solved.proven(0.5)


EXACT_ONLY = (7, 5, [15, 1, 16, 3])


@pytest.mark.parametrize(
    ("room", "alpha", "dp", "pp"),
    [
        ([16, 16], 0.3, 1, 1),  # all in one
        ([8, 8], 0.0, 2, 1),  # pipelines whole
        ([8, 8], 1.0, 1, 2),  # DP groups whole
        ([4, 4, 4, 4], 0.5, 2, 2),  # blocks: whole groups of either kind cost 4 of the other
        ([4, 4, 4, 4], 0.0, 4, 1),
        ([3, 13], 0.0, 2, 2),  # no room for whole pipelines
    ],
)
def test_layouts_of_four_by_four(room: list[int], alpha: float, dp: int, pp: int) -> None:
    found = fill(4, 4, room, alpha)
    assert found.weighted(alpha) == weighted(dp, pp, alpha)
    assert exact(4, 4, room, alpha, limit_s=60).filled.weighted(alpha) == weighted(dp, pp, alpha)


def test_arnold_moves_whole_pipelines() -> None:
    found = arnold(4, 4, [4, 4, 4, 4], 0.5)
    assert found is not None
    _holds(found, 4, 4, [4, 4, 4, 4])
    assert (found.dp, found.pp) == (4, 1), "blocks are not in its program"
    packed = arnold(4, 4, [7, 9, 2, 2], 1.0)
    assert packed is not None
    assert {pod for row in packed.grid for pod in row} == {0, 1}, "alpha 1 is bin packing"


@pytest.mark.parametrize(("slack", "gap"), [(1.0, 1.45), (1.03, 1.25), (1.3, 1.1)])
def test_two_thousand_nodes(slack: float, gap: float) -> None:
    """The stated gap: larger where not a node is to spare."""
    chance = random.Random(1)
    for _ in range(3):
        shares = [chance.uniform(0.5, 1.5) for _ in range(20)]
        room = [int(2000 * slack * share / sum(shares)) + 1 for share in shares]
        for alpha in (0.3, 0.5):
            found = fill(125, 16, room, alpha)
            _holds(found, 125, 16, room)
            assert found.weighted(alpha) <= gap * bound(125, 16, room, alpha)


@pytest.mark.parametrize("size", [(0, 1), (1, 0), (2, 2)])
def test_what_does_not_fit(size: tuple[int, int]) -> None:
    for function in (fill, exact, arnold, bound):
        with pytest.raises(ValueError, match=r"no cell|room for 3"):
            function(*size, [3], 0.5)


def test_infeasible_programs_are_told() -> None:
    program = Program()
    one = program.integer(1)
    program.between(2, [(one, 1)], 3)
    assert program.solve(5).values is None
    assert program.solve(5).proven


# -- order


def _pods(**sizes: int) -> dict[str, str]:
    return {f"{pod}{i}": pod for pod, size in sizes.items() for i in range(size)}


def test_order_keeps_pipelines_together() -> None:
    pods = _pods(x=8, y=8)
    mesh = {"pp": 4, "dp": 4}  # consecutive ranks are of one DP group
    placed = order(list(pods), mesh, 1, pods, alpha=0.0)
    assert sorted(placed) == sorted(pods)
    job = groups(mesh, 1, 16)
    assert spread(job, [pods[node] for node in placed]).pp == 1
    assert spread(job, [pods[node] for node in pods]).pp == 2
    # Consecutive places of a minipod have consecutive nodes.
    for pod in "xy":
        assert [node for node in placed if pods[node] == pod] == [f"{pod}{i}" for i in range(8)]


@pytest.mark.parametrize(
    ("mesh", "ranks", "pods"),
    [
        ({"dp": 4}, 1, _pods(x=4)),
        ({"dp": 4}, 1, {}),
        ({"pp": 2, "dp": 2}, 1, _pods(x=2, y=2)),  # DP groups are whole; turning is no better
        ({}, 8, _pods(x=2, y=2)),
    ],
)
def test_an_order_that_is_good_is_kept(
    mesh: dict[str, int], ranks: int, pods: dict[str, str]
) -> None:
    nodes = ["x1", "x0", "y1", "y0"] if "y0" in pods else ["x2", "x0", "x1", "x3"]
    assert order(nodes, mesh, ranks, pods, alpha=0.5) == nodes


def test_spares_come_last() -> None:
    pods = _pods(x=1, y=4, z=1)
    placed = order(list(pods), {"dp": 4}, 1, pods)
    assert placed == ["y0", "y1", "y2", "y3", "x0", "z0"]


def test_tensor_groups_of_two_nodes_stay_together() -> None:
    mesh, pods = {"pp": 2, "dp": 4, "tp": 4}, _pods(x=5, y=6, z=7)
    nodes = random.Random(0).sample(list(pods), len(pods))
    job = groups(mesh, 2, 16)
    cells = cells_of(job, 16)
    assert cells is not None
    assert (cells.rows, cells.columns, cells.depth) == (4, 2, 2)
    placed = order(nodes, mesh, 2, pods)
    assert sorted(placed) == sorted(nodes)
    assert all(len({pods[placed[p]] for p in group}) == 1 for group in job.tp)


def test_groups_that_are_no_grid() -> None:
    mesh, pods = {"pp": 2, "dp": 3}, _pods(x=2, y=2)
    assert cells_of(groups(mesh, 2, 3), 3) is None
    assert sorted(order(["x0", "y0", "x1", "y1"], mesh, 2, pods)) == sorted(pods)


@pytest.mark.parametrize(
    ("nodes", "ranks", "match"),
    [(["a", "a"], 1, "of which 1 are"), (["a"], 1, "1 nodes for a job of 4"),
     (["a", "b", "c", "d"], 0, "0 ranks per node"), ([], 1, "0 nodes")],
)  # fmt: skip
def test_bad_orders(nodes: list[str], ranks: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        order(nodes, {"dp": 4}, ranks, {})


@settings(deadline=None)
@given(st.data())
def test_order_is_a_permutation_and_never_worse(data: st.DataObject) -> None:
    names = data.draw(st.permutations(["pp", "dp", "tp"]))
    mesh = {name: data.draw(st.integers(1, 4)) for name in names}
    world = mesh["pp"] * mesh["dp"] * mesh["tp"]
    ranks = data.draw(st.integers(1, 4))
    places = -(-world // ranks)
    nodes = [f"n{i}" for i in range(places + data.draw(st.integers(0, 3)))]
    switches = {n: data.draw(st.sampled_from("ABCD")) for n in nodes if n != "n1"}
    alpha = data.draw(ALPHAS)
    placed = order(nodes, mesh, ranks, switches, alpha)
    assert sorted(placed) == sorted(nodes)
    job = groups(mesh, ranks, places)
    old, new = (
        spread(job, [switches.get(n, UNKNOWN) for n in line[:places]]) for line in (nodes, placed)
    )
    assert new.weighted(alpha) <= old.weighted(alpha)
    assert order(placed, mesh, ranks, switches, alpha) == placed, "a good order is kept"


# -- the benchmark


@pytest.mark.parametrize("baseline", BASELINES)
def test_baselines_use_free_nodes(baseline: str) -> None:
    chance = random.Random(3)
    for _ in range(50):
        room = [chance.randrange(6) for _ in range(5)]
        need = chance.randint(0, sum(room))
        chosen = Counter(BASELINES[baseline](room, need, chance))
        assert chosen.total() == need
        assert all(n <= room[pod] for pod, n in chosen.items())


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [("best-fit", [2, 2, 0, 0, 0]), ("packing", [1, 1, 1, 1, 1]), ("bipartition", [1] * 5)],
)
def test_baselines(baseline: str, expected: list[int]) -> None:
    assert BASELINES[baseline]([3, 6, 2], 5, random.Random(0)) == expected


def test_benchmark_of_the_small_setting() -> None:
    results = Results("placement", quick=True)
    CASES["small"](results)
    assert results.ratios["small.alpha0.3.arnold/ours.mean"] >= 1
    assert results.ratios["small.alpha0.3.best-baseline/ours.max"] >= 1
    assert results.ratios["small.alpha0.3.ours/bound.max"] >= 1
