"""The ranks' next places: in their slots, or where torchrun's own numbering puts them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from srun_wrapper.seats import Seen, seats

STATIC = "torchrun --nproc-per-node=2 train.py"
C10D = "torchrun --rdzv-backend=c10d --nproc-per-node=2 train.py"
ONE_EACH = [(0,), (1,), (2,)]

Places = dict[int, tuple[int, int]]


def seen(*nodes: str, per_node: int = 2, epoch: int = 1) -> dict[int, Seen]:
    """Ranks numbered along these nodes, which are in the places 0, 1, …"""
    return {
        place * per_node + i: Seen(epoch, place, 0, node)
        for place, node in enumerate(nodes)
        for i in range(per_node)
    }


def in_order(*places: int, per_node: int = 2) -> Places:
    return {k * per_node + i: (place, 0) for k, place in enumerate(places) for i in range(per_node)}


FIRST = seen("n1", "n2", "n3")
OTHER_NAMES = seen("n2", "n1", "n3")  # so it was not the nodes' names that torchrun sorted
MIXED = FIRST | {2: Seen(2, 2, 0, "n3")}  # only one rank came up in the last epoch
UNEVEN = {0: Seen(1, 0, 0, "n1"), 1: Seen(1, 1, 0, "n2"), 2: Seen(1, 1, 0, "n2")}
UNEVEN |= {3: Seen(1, 2, 0, "n3")}


@pytest.mark.parametrize(
    ("command", "names", "world", "known", "expected"),
    [
        pytest.param(C10D, "n1 n4 n3", 6, FIRST, in_order(0, 2, 1), id="a spare in the middle"),
        pytest.param(C10D, "n1 n2 n4", 6, FIRST, in_order(0, 1, 2), id="a spare at the end"),
        pytest.param(C10D, "n4 n2 n3", 6, FIRST, in_order(1, 2, 0), id="a spare for the first"),
        pytest.param(C10D, "n1 n10 n3", 6, FIRST, in_order(0, 1, 2), id="as words, not as numbers"),
        pytest.param(C10D, "n1 n4 n3", 6, {}, in_order(0, 2, 1), id="no rank was ever heard of"),
        pytest.param(C10D, "n1 n4 n3", 6, MIXED, in_order(0, 2, 1), id="some came up since"),
        pytest.param(C10D, "n1 n4 n3", 4, UNEVEN, {0: (0, 0), 1: (2, 0), 2: (1, 0), 3: (1, 0)},
                     id="unequal nodes"),
        pytest.param(C10D, "n1 n4 n3", 3, seen("n1", "n2", "n3", per_node=1),
                     in_order(0, 2, 1, per_node=1), id="one rank a node"),
        pytest.param(C10D, "n1 n4 n3", 6, OTHER_NAMES, in_order(0, 1, 2),
                     id="it sorts other names: as they were"),
        pytest.param(C10D, "n1 n4 n3", 4, {0: Seen(1, 0, 0, "n1")}, {0: (0, 0)},
                     id="a world that cannot be divided"),
        pytest.param(C10D.replace("c10d", "etcd-v2"), "n1 n4 n3", 6, FIRST, in_order(0, 2, 1),
                     id="etcd-v2 does the same"),
        pytest.param(C10D.replace("c10d", "etcd"), "n1 n4 n3", 6, FIRST, in_order(0, 1, 2),
                     id="etcd numbers them as they come: nobody knows"),
        pytest.param(f"{C10D[:8]} --local-addr=x {C10D[9:]}", "n1 n4 n3", 6, FIRST,
                     in_order(0, 1, 2), id="all nodes have one address: nobody knows"),
        pytest.param(STATIC, "n1 n4 n3", 6, FIRST, in_order(0, 1, 2), id="static"),
        pytest.param("bash run.sh", "n1 n4 n3", 6, FIRST, in_order(0, 1, 2), id="hidden"),
        pytest.param("python train.py", "n1 n4 n3", 3, {}, in_order(0, 1, 2, per_node=1),
                     id="slots are ranks"),
        pytest.param(STATIC, "n1 n4 n3", 6, {}, {}, id="static, no rank was ever heard of"),
    ],
)  # fmt: skip
def test_one_slot_on_each_node(
    command: str, names: str, world: int, known: Mapping[int, Seen], expected: Places
) -> None:
    assert seats(command.split(), {}, names.split(), ONE_EACH, world, known) == expected


def test_several_slots_on_a_node_keep_theirs() -> None:
    slots = [(0, 1), (2, 3)]
    expected = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    for command in ("python train.py", C10D):
        assert seats(command.split(), {}, ["n4", "n2"], slots, 4, {}) == expected


def test_the_backend_may_stand_in_the_environment() -> None:
    env = {"PET_RDZV_BACKEND": "c10d"}
    assert seats(STATIC.split(), env, ["n4", "n2", "n3"], ONE_EACH, 6, {}) == in_order(1, 2, 0)
    env["PET_STANDALONE"] = "1"
    assert seats(STATIC.split(), env, ["n4", "n2", "n3"], ONE_EACH, 6, FIRST) == in_order(0, 1, 2)


def test_torch_sorts_its_nodes_so() -> None:
    rendezvous = pytest.importorskip("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    names = ["n1", "n10", "n2", "gpu-b", "gpu-a", "N3"]
    nodes = [rendezvous._NodeDesc(f"{name}.cluster", pid, 0) for pid, name in enumerate(names)]
    slots = [(place,) for place in range(len(names))]
    found = seats(C10D.split(), {}, names, slots, len(names), {})
    assert [place for place, _ in found.values()] == [node.pid for node in sorted(nodes)]
