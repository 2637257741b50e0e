"""Name the ranks that make a job slow: what looks like one, and what only looks like it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest

from srun_wrapper.locate.ranks import RankView
from srun_wrapper.locate.slow import LOOKS, ROUNDS, WINS, Kind, Slow, judge

MAIN = "<module> (train.py:40)"
REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py:3032)", MAIN)
RECV = ("irecv (torch/distributed/distributed_c10d.py:60)", MAIN)
BACKWARD = ("_engine_run_backward (torch/autograd/graph.py:841)", MAIN)
WORK = ("forward (model.py:7)", "step (train.py:12)", MAIN)
ITEM = ("step (train.py:13)", MAIN)  # loss.item(): a wait for the device has no Python frame
LOAD = ("_try_get_data (torch/utils/data/dataloader.py:1275)", MAIN)
SAVE = ("save (torch/serialization.py:9)", MAIN)
WORLD, PER_NODE = 8, 2

Where = Callable[[int, int, random.Random], Sequence[str]]
"""Stack of a rank in a round."""


def looks(where: Where, world: int = WORLD, state: str = "S", failed: str = "") -> Slow:
    dice = random.Random(7)
    rounds = [
        [
            [
                RankView(
                    rank, f"n{rank // PER_NODE}", where(rank, number, dice), state, failed=failed
                )
                for rank in range(world)
            ]
            for _ in range(LOOKS)
        ]
        for number in range(ROUNDS)
    ]
    return judge(rounds, world)


def busy(share: float, dice: random.Random, stack: Sequence[str] = WORK) -> Sequence[str]:
    return stack if dice.random() < share else REDUCE


def one(slow: float, others: float, stack: Sequence[str] = WORK) -> Where:
    """Rank 5 is outside collectives for this share of the time."""
    return lambda rank, _, dice: busy(slow if rank == 5 else others, dice, stack)


CASES: dict[str, tuple[Where, Kind, tuple[int, ...]]] = {
    "ten times as slow": (one(1.0, 0.1), "ranks", (5,)),
    "twice as slow": (one(0.97, 0.5), "ranks", (5,)),
    "hardly slower: cannot be told": (one(1.0, 0.77), "all", ()),
    "both ranks of a node": (
        lambda rank, _, dice: busy(0.98 if rank in (4, 5) else 0.2, dice), "ranks", (4, 5)
    ),
    "a pipeline waits for it": (
        lambda rank, _, dice: WORK if rank == 5 else RECV if rank in (1, 3, 7) else REDUCE,
        "ranks", (5,),
    ),
    "all are slow alike": (lambda _r, _n, dice: busy(0.9, dice), "all", ()),
    "all wait for their devices": (lambda *_: ITEM, "all", ()),
    "all are half in collectives": (lambda _r, _n, dice: busy(0.45, dice), "unclear", ()),
    "communication": (lambda _r, _n, dice: busy(0.05, dice), "communication", ()),
    "hidden in a backward pass": (lambda *_: BACKWARD, "communication", ()),
    "another rank in each round": (
        lambda rank, number, dice: busy(1.0 if rank == number else 0.1, dice), "unclear", ()
    ),
    "only in some rounds": (
        lambda rank, number, dice: busy(1.0 if rank == 5 and number < WINS - 1 else 0.1, dice),
        "unclear", (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_stands_out(case: str) -> None:
    where, kind, ranks = CASES[case]
    found = looks(where)
    assert (found.kind, found.ranks) == (kind, ranks), found
    assert found.nodes == (("n2",) if ranks else ()) and found.node == ("n2" if ranks else "")


def test_it_says_where_the_rank_is() -> None:
    found = looks(one(1.0, 0.0))
    assert found.calls == ("forward (model.py)", "step (train.py)", "<module> (train.py)")
    assert found.why == (
        "rank 5 on n2 is outside collectives in 100 % of the looks, the others in 0 %"
    )
    assert found.wins == ROUNDS and not found.loads and not found.saves


def test_data_and_checkpoints_are_known() -> None:
    assert looks(one(1.0, 0.0, LOAD)).loads
    own = ("wait (threading.py:327)", "_next_step (robust_slurm/data/loader.py:131)")
    assert looks(one(1.0, 0.0, own)).loads
    assert looks(one(1.0, 0.0, SAVE)).saves


@pytest.mark.parametrize(
    ("own", "same_node", "others", "said"),
    [
        (0.9, 0.9, 0.0, "in 90 % of the looks, the ranks of other nodes in 0 %"),
        (0.6, 0.0, 0.0, "in 60 % of the looks, the ranks of other nodes in 0 %"),
        (0.9, 0.9, 0.05, "in 90 % of the looks, the ranks of other nodes in 5 %"),
        (0.9, 0.9, 0.3, ""),  # they wait for it as well: the server, or the program
        (0.3, 0.0, 0.0, ""),  # it computes, and reads now and then
    ],
)
def test_a_file_system_that_is_slow_on_one_node(
    own: float, same_node: float, others: float, said: str
) -> None:
    def mount(rank: int, look: int) -> str:
        share = own if rank == 5 else same_node if rank == 4 else others
        return "/data" if look < round(share * LOOKS * ROUNDS) else ""

    rounds = [
        [
            [
                RankView(r, f"n{r // PER_NODE}", WORK if r == 5 else REDUCE, mount=mount(r, look))
                for r in range(WORLD)
            ]
            for look in range(number * LOOKS, (number + 1) * LOOKS)
        ]
        for number in range(ROUNDS)
    ]
    found = judge(rounds, WORLD)
    assert found.ranks == (5,) and said in found.storage and bool(found.storage) is bool(said)
    if said:
        assert found.storage.startswith("these ranks wait for file system /data in ")
        assert found.storage.endswith(": it is slow on n2, or they alone use it so much")


def test_ranks_on_several_nodes_name_no_node() -> None:
    found = looks(lambda rank, _, dice: busy(1.0 if rank in (2, 5) else 0.1, dice))
    assert (found.kind, found.ranks, found.nodes, found.node) == ("ranks", (2, 5), ("n1", "n2"), "")


def test_stacks_that_cannot_be_read() -> None:
    found = looks(lambda *_: (), failed="py-spy was refused: no permission")
    assert found.kind == "unknown" and "no permission" in found.why


def test_a_rank_in_a_disk_wait_shows_no_stack() -> None:
    dice = random.Random(1)
    rounds = [
        [
            [
                RankView(rank, f"n{rank}", () if rank == 2 else busy(0.1, dice), "D")
                for rank in range(4)
            ]
            for _ in range(LOOKS)
        ]
        for _ in range(ROUNDS)
    ]
    assert judge(rounds, 4).ranks == (2,)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_of_a_thousand_equal_ranks_none_is_named_as_a_node(share: float) -> None:
    found = looks(lambda _r, _n, dice: busy(share, dice), world=1000)
    assert not found.node


def test_ten_thousand_ranks_are_judged_in_a_moment() -> None:
    began = time.process_time()
    assert looks(one(1.0, 0.1), world=10_000).ranks == (5,)
    assert time.process_time() - began < 10.0
