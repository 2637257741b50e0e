"""The small worlds of a replay: which nodes belong together, what their ranks see."""

from __future__ import annotations

import pytest

from health.active.coordinator.replay import ReplayLayoutError, groups, next_groups
from robust_slurm.config import Config
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Hello
from srun_wrapper.replay.orders import WorldShape, replay_orders, shape


def slots(places: int, each: int) -> list[tuple[int, ...]]:
    return [tuple(range(i * each, (i + 1) * each)) for i in range(places)]


@pytest.mark.parametrize(
    ("mesh", "places", "each", "unit", "order", "small"),
    [
        # one node is one (pp, dp) cell; stages are far apart, replicas are not
        ("pp=2,dp=4", 8, 1, 2, (0, 4, 1, 5, 2, 6, 3, 7), "pp=2,dp=1"),
        ("dp=4,pp=2", 8, 1, 2, tuple(range(8)), "dp=1,pp=2"),
        ("pp=2,dp=4,tp=4", 8, 4, 2, (0, 4, 1, 5, 2, 6, 3, 7), "pp=2,dp=1,tp=4"),
        # a tensor group over two nodes
        ("dp=3,tp=4", 6, 2, 2, tuple(range(6)), "dp=1,tp=4"),
        # a node has two replicas of a pipeline's stage: nodes 0 and 2, 1 and 3 belong together
        ("pp=2,dp=4", 4, 2, 2, (0, 2, 1, 3), "pp=2,dp=2"),
        # whole replicas in a node: pairs of nodes
        ("dp=8,tp=2", 4, 4, 1, (0, 1, 2, 3), "dp=4,tp=2"),
        ("dp=8", 4, 2, 1, (0, 1, 2, 3), "dp=4"),
        ("dp_replicate=2,dp_shard=4,tp=2", 8, 2, 1, tuple(range(8)),
         "dp_replicate=1,dp_shard=2,tp=2"),
        # context parallelism is not made smaller
        ("dp=4,cp=2", 8, 1, 2, tuple(range(8)), "dp=1,cp=2"),
    ],
)  # fmt: skip
def test_shapes(
    mesh: str,
    places: int,
    each: int,
    unit: int,
    order: tuple[int, ...],
    small: str,
) -> None:
    found = shape(parsed(mesh), slots(places, each), places)
    assert (found.layout.unit, found.order) == (unit, order)
    assert found.mesh == parsed(small)


def parsed(text: str) -> dict[str, int]:
    return {k: int(v) for k, _, v in (part.partition("=") for part in text.split(",") if part)}


@pytest.mark.parametrize(
    ("mesh", "ranks", "says"),
    [
        ("pp=2,dp=4", slots(4, 1), "the mesh has 8 ranks, the job has 4"),
        ("pp=4,dp=1", slots(4, 1), "one replica"),
        ("pp=2,tp=2", slots(4, 1), "no dimension of the mesh"),
        ("dp=3", [(0, 1), (2,)], "different numbers of ranks"),
        ("dp=2,pp=3", slots(3, 2), "one replica"),  # the middle node has a bit of both
    ],
)
def test_what_cannot_be_cut(mesh: str, ranks: list[tuple[int, ...]], says: str) -> None:
    with pytest.raises(ReplayLayoutError, match=says):
        shape(parsed(mesh), ranks, len(ranks))


def test_torchruns_nodes() -> None:
    """One task in each, which starts eight ranks."""
    cut = shape(parsed("pp=2,dp=4,tp=8"), 8, 8)
    assert cut.order == (0, 4, 1, 5, 2, 6, 3, 7)
    assert cut.ranks(2, 1) == [(0,), (1,)]


def test_ranks_go_round_the_nodes_in_small_worlds_too() -> None:
    cut = shape(parsed("dp=8"), [(0, 4), (1, 5), (2, 6), (3, 7)], 4)
    assert cut.ranks(2, 2) == [(0, 2), (1, 3)]


# -- orders


def job(places: int = 8, each: int = 2) -> JobState:
    state = JobState(Config(), 12, "n0")
    state.step_id = "3"
    nodes = []
    for i in range(places):
        tasks = tuple(range(i * each, (i + 1) * each))
        hello = Hello(12, "3", i, f"n{i}", tasks, places, places * each, 7000 + i, 5000 + i, 0, 0)
        node = Node((12, "3", i), f"n{i}", f"10.0.0.{i}", hello, None, Role.ACTIVE, 0.0, 5000 + i)
        nodes.append(node)
    state.members.lay_out(nodes, slots(places, each))
    state.world.epoch = 4
    return state


def cut_of(each: int = 2) -> WorldShape:
    return shape(parsed(f"pp=2,dp=4,tp={each}"), slots(8, each), 8)


def test_a_group_is_a_world_of_its_own() -> None:
    state, cut = job(), cut_of()
    found = replay_orders(state, cut, next_groups(cut.layout, ()), 5, 1.5, {"MINE": "1"})
    assert [node.name for node, _ in found] == ["n0", "n4", "n1", "n5", "n2", "n6", "n3", "n7"]
    _node, order = found[3]  # the second stage of the second pipeline
    assert (order.epoch, order.grace, order.first) == (5, 1.5, False) and order.restore is None
    assert (order.master, order.port) == ("10.0.0.1", 5001)
    assert [(r.local, r.rank) for r in order.ranks] == [(0, 10), (1, 11)]  # as in the job
    env = order.env | order.ranks[1].env
    expected = {
        "RANK": "3", "SLURM_PROCID": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4",
        "SLURM_NTASKS": "4", "NODE_RANK": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": "n[1,5]", "SLURMD_NODENAME": "n5", "SLURM_GTIDS": "2,3",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5001", "ROBUST_EPOCH": "5", "MINE": "1",
        "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "LOCAL_WORLD_SIZE": "2",
        "ROBUST_REPLAY": "1", "ROBUST_REPLAY_STEPS": "5", "ROBUST_REPLAY_GROUP": "1",
        "ROBUST_REPLAY_MESH": "pp=2,dp=1,tp=2",
    }  # fmt: skip
    assert {name: env.get(name) for name in expected} == expected
    assert "ROBUST_RESUME_STEP" not in env


def test_what_an_agent_needs_when_the_supervisor_is_gone_stays_the_jobs() -> None:
    """The index elects the node that brings the job back; small worlds have many a node 0."""
    state, cut = job(), cut_of()
    found = replay_orders(state, cut, next_groups(cut.layout, ()), 5, 1.0, {})
    assert {node.name: order.index for node, order in found} == {f"n{i}": i for i in range(8)}
    assert all(order.nodes == 8 for _, order in found)
    assert [peer.index for peer in found[0][1].peers] == list(range(8))


def test_the_supervisor_keeps_its_ranks() -> None:
    state, cut = job(), cut_of()
    replay_orders(state, cut, groups(cut.layout, 1), 5, 1.0, {})
    assert state.world.epoch == 5 and state.world.by_rank[11].node.name == "n5"
    assert not state.world.by_rank[11].started


def test_nodes_in_no_group_get_no_order() -> None:
    state, cut = job(), cut_of()
    found = replay_orders(state, cut, groups(cut.layout, 0)[1:], 5, 1.0, {})
    assert {node.name for node, _ in found} == {"n1", "n2", "n3", "n5", "n6", "n7"}
