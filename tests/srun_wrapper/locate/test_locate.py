"""Locate the rank that the others wait for, and the suspect machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from srun_wrapper.locate.locate import Located, locate
from srun_wrapper.locate.ranks import RankView, dominant, grouped, rank_list, shared_group
from srun_wrapper.locate.stacks import key, waits
from srun_wrapper.locate.story import MOST, story

MAIN = "<module> (train.py:40)"
C10D = "torch/distributed/distributed_c10d.py"
REDUCE = (f"all_reduce ({C10D}:3032)", "wrapper (torch/distributed/c10d_logger.py:81)", MAIN)
GATHER = (f"all_gather_into_tensor ({C10D}:40)", MAIN)
SEND = (f"isend ({C10D}:50)", "send_forward (schedule.py:9)", MAIN)
RECV = (f"irecv ({C10D}:60)", "recv_forward (schedule.py:5)", MAIN)
BACKWARD = ("_engine_run_backward (torch/autograd/graph.py:841)", "backward (_tensor.py:1)", MAIN)
SLEEP = ("augment (data.py:7)", MAIN)
LOAD = ("_try_get_data (torch/utils/data/dataloader.py:1275)", "__next__ (dataloader.py:701)", MAIN)
A, B = ("f (a.py:1)",), ("g (a.py:2)",)
PAPER: Mapping[str, int] = {"dp": 4, "pp": 4, "tp": 2}  # ByteRobust's Fig. 7: TP=2, PP=4, DP=4


def views(
    stacks: Sequence[Sequence[str]],
    per_node: int = 1,
    steps: Sequence[int | None] | None = None,
    states: Mapping[int, str] | None = None,
) -> list[RankView]:
    return [
        RankView(
            rank,
            f"n{rank // per_node}",
            stack,
            (states or {}).get(rank, "S"),
            steps[rank] if steps else None,
        )
        for rank, stack in enumerate(stacks)
    ]


@pytest.mark.parametrize(
    ("stack", "call"),
    [
        (REDUCE, f"all_reduce ({C10D})"),
        (BACKWARD, "_engine_run_backward (torch/autograd/graph.py)"),
        (("all_reduce (toy.py:3)", MAIN), "all_reduce (toy.py)"),
        (("receive (toy.py:1)", "<genexpr> (toy.py:2)", "all_reduce (toy.py:3)", MAIN),
         "all_reduce (toy.py)"),
        (("wait (threading.py:327)", "get (queue.py:180)", MAIN), ""),
        (("wait (multiprocessing/connection.py:947)", MAIN), ""),
        (("recv (socket.py:3)", MAIN), ""),
        ((f"_store_based_barrier ({C10D}:9)", MAIN), f"_store_based_barrier ({C10D})"),
        (("forward (model.py:3)", *BACKWARD), ""),  # computes again in the backward pass
        (SLEEP, ""),
        (LOAD, ""),
        ((), ""),
    ],
)  # fmt: skip
def test_calls_that_wait_for_other_ranks(stack: tuple[str, ...], call: str) -> None:
    assert waits(stack) == call


def test_a_key_has_no_line_numbers() -> None:
    assert key(("f (a.py:1)", "g (b:2).py:30)")) == ("f (a.py)", "g (b:2).py)")


@pytest.mark.parametrize(
    ("stacks", "steps", "odd"),
    [
        ([A, A, A, B], [5, 5, 5, 5], (3,)),
        ([A, A, A, A], [5, 5, 5, 4], (3,)),
        ([A, A, B, A], [5, 5, 5, 4], (3,)),  # steps say more than stacks
        ([A, A, B, B], [5, 5, 5, 5], ()),
        ([A, B], [5, 5], ()),
        ([A, A, B], [None, None, None], (2,)),
        ([A, A, ()], [5, 5, 5], ()),
        ([A, A, A], [5, 5, 5], ()),
        ([A, A, A], [5, 5, 6], ()),  # ahead of the others is no fault
        ([], [], ()),
        ([B, A, B, A, A, A], [1, 1, 1, 1, 1, 1], (0, 2)),
        ([REDUCE, SLEEP], [5, 5], (1,)),  # no majority, but one waits
        ([REDUCE, REDUCE, SLEEP, SLEEP], [5, 5, 5, 5], (2, 3)),
        ([REDUCE, SLEEP, SLEEP], [5, 5, 5], ()),  # the first one is early
        ([BACKWARD, BACKWARD, BACKWARD, SLEEP], [5, 5, 5, 5], (3,)),
        ([REDUCE, REDUCE, LOAD, REDUCE], [5, 5, 5, 4], (2,)),  # a rank at work says more than steps
        ([REDUCE, GATHER, REDUCE, REDUCE], [5, 5, 5, 5], (1,)),  # another collective
        ([LOAD, LOAD, LOAD, LOAD], [5, 5, 5, 5], ()),
        ([LOAD, LOAD, LOAD, REDUCE], [5, 5, 5, 5], ()),  # it waits for the others
    ],
)
def test_ranks_that_stand_out(
    stacks: list[tuple[str, ...]], steps: list[int | None], odd: tuple[int, ...]
) -> None:
    assert locate(views(stacks, 1, steps), {}).ranks == odd


def test_line_numbers_make_no_outlier() -> None:
    moved = (*REDUCE[:-1], "<module> (train.py:41)")
    assert locate(views([REDUCE, REDUCE, moved, REDUCE]), {}) == Located(why="no rank stands out")


@pytest.mark.parametrize("stack", [(), REDUCE])
def test_a_stopped_rank_stands_out_whatever_its_stack(stack: tuple[str, ...]) -> None:
    found = locate(views([REDUCE, REDUCE, stack, SLEEP], 2, states={2: "T"}), {})
    assert (found.ranks, found.nodes) == ((2,), ("n1",)) and "stopped" in found.why


def test_a_rank_without_a_stack_that_waits_for_a_device() -> None:
    assert locate(views([REDUCE, REDUCE, (), REDUCE], states={2: "D"}), {}).nodes == ("n2",)
    assert locate(views([REDUCE, REDUCE, (), REDUCE]), {}).nodes == ()


def paper(**machines: tuple[str, ...]) -> list[RankView]:
    """16 machines of 2 ranks; ``m15``: the stack of machine 15, all others synchronise."""
    of_machine = [machines.get(f"m{number}", REDUCE) for number in range(16)]
    return views([stack for stack in of_machine for _ in range(2)], 2)


def test_byterobusts_example() -> None:
    """Machine 15 is stuck in all_gather_into_tensor, 14 in isend, 12 and 13 in irecv."""
    found = locate(paper(m12=RECV, m13=RECV, m14=SEND, m15=GATHER), PAPER)
    assert found.ranks == tuple(range(24, 32)) == found.group
    assert found.nodes == ("n12", "n13", "n14", "n15")


def test_in_a_group_the_rank_outside_all_collectives_is_waited_for() -> None:
    found = locate(paper(m12=RECV, m13=RECV, m14=SEND, m15=SLEEP), PAPER)
    assert (found.ranks, found.nodes) == ((30, 31), ("n15",))


@pytest.mark.parametrize(
    ("mesh", "nodes"),
    [(PAPER, ("n12", "n13", "n14", "n15")), ({}, ()), ({"dp": 32}, ()), ({"dp": 7}, ())],
)
def test_without_a_group_many_nodes_are_one_cause(
    mesh: Mapping[str, int], nodes: tuple[str, ...]
) -> None:
    found = locate(paper(m12=RECV, m13=RECV, m14=SEND, m15=GATHER), mesh)
    assert found.nodes == nodes and found.clear is bool(nodes)
    assert nodes or "one cause that they share" in found.why


@pytest.mark.parametrize(
    ("stuck", "of", "nodes"),
    [
        ((3,), 8, ("n3",)),
        ((3, 5), 8, ("n3", "n5")),
        ((1, 3, 5), 8, ()),  # a file system that does not answer: 3 of 8
        (tuple(range(5)), 100, tuple(f"n{i}" for i in range(5))),  # 5 %
        (tuple(range(6)), 100, ()),
        ((0, 1), 2, ()),
    ],
)
def test_how_many_nodes_may_stand_out(
    stuck: tuple[int, ...], of: int, nodes: tuple[str, ...]
) -> None:
    stacks = [LOAD if rank in stuck else REDUCE for rank in range(of)]
    assert locate(views(stacks), {}).nodes == nodes


def test_all_outliers_on_one_machine() -> None:
    found = locate(views([REDUCE] * 8 + [GATHER, SEND, RECV, GATHER], 4), {})
    assert (found.ranks, found.nodes) == ((8, 9, 10, 11), ("n2",))


@pytest.mark.parametrize(
    ("ranks", "mesh", "group"),
    [
        ((24, 26, 28, 31), PAPER, tuple(range(24, 32))),
        ((24, 26), PAPER, (24, 26, 28, 30)),  # along pp alone
        ((24, 25), PAPER, (24, 25)),
        ((3,), PAPER, (3,)),
        ((0, 8), PAPER, (0, 8, 16, 24)),
        ((0, 31), PAPER, ()),
        ((0, 1), {"dp": 2}, ()),
        ((0, 1), {"dp": 2, "tp": 1}, ()),
        ((0, 40), PAPER, ()),
        ((), PAPER, ()),
    ],
)
def test_the_smallest_group_that_ranks_share(
    ranks: tuple[int, ...], mesh: Mapping[str, int], group: tuple[int, ...]
) -> None:
    assert shared_group(ranks, mesh, 32 if mesh is PAPER else 2) == group


@pytest.mark.parametrize(
    ("sizes", "found"),
    [((2, 1), 2), ((4, 2), 4), ((3, 2), 0), ((1,), 0), ((2, 1, 1, 1), 0), ((), 0)],
)
def test_the_dominant_group(sizes: tuple[int, ...], found: int) -> None:
    stacks = [(f"f{n} (a.py:1)",) for n, size in enumerate(sizes) for _ in range(size)]
    group = dominant(grouped(views(stacks)))
    assert (len(group.ranks) if group else 0) == found


def test_rank_lists_are_short() -> None:
    assert rank_list([3, 0, 1, 2, 7]) == "0-3,7"
    assert rank_list(range(0, 40, 2)) == "0,2,4,6,8,10,12,14 and others (20 in all)"


# -- who waits for whom


def told(stacks: list[RankView], mesh: Mapping[str, int] | None = None) -> tuple[str, ...]:
    return story(stacks, locate(stacks, mesh or {}))


def test_the_story_of_a_stuck_rank() -> None:
    assert told(views([REDUCE, REDUCE, SLEEP, BACKWARD])) == (
        "rank 2 is in no collective: the other 3 wait for it; node: n2",
        "rank 2 on n2: in augment (data.py:7) < <module> (train.py:40)",
        f"ranks 0-1 on n[0-1]: waiting in all_reduce ({C10D})",
        "rank 3 on n3: waiting in _engine_run_backward (torch/autograd/graph.py)",
    )


def test_the_story_names_the_loader_that_stands_out() -> None:
    idle = (
        "poll (selectors.py:4)",
        "get (multiprocessing/queues.py:1)",
        "_worker_loop (worker.py:9)",
    )
    stuck = ("acquire (lock.py:4)", "__getitem__ (data.py:3)", "_worker_loop (worker.py:12)")
    found = [
        RankView(rank, f"n{rank}", LOAD if rank == 1 else REDUCE, loaders=((70, idle), (71, idle)))
        for rank in range(3)
    ]
    found[1] = RankView(1, "n1", LOAD, loaders=((70, idle), (71, stuck)))
    lines = told(found)
    assert lines[2].startswith("its data-loader worker 71: in acquire (lock.py:4) < __getitem__")


def test_the_story_is_ten_lines_at_most() -> None:
    stacks = [(f"all_reduce (a{n % 30}.py:1)", MAIN) for n in range(300)] + [SLEEP] * 9 + [()]
    found = views(stacks, 10)
    lines = told(found)
    assert len(lines) <= MOST
    assert "270 more ranks in 27 other places" in lines[-2]
    assert lines[-1] == "no stack of 1 of 310 ranks: no answer"


def test_the_story_says_why_there_are_no_stacks() -> None:
    refused = "py-spy was refused: kernel.yama.ptrace_scope = 1"
    found = [RankView(rank, "n1", failed=refused) for rank in range(3)]
    assert told(found) == ("no rank stands out", f"no stack of 3 of 3 ranks: {refused}")


def test_the_story_has_what_the_kernel_shows_the_rank_that_is_waited_for_first() -> None:
    found = views([SLEEP if rank == 4 else REDUCE for rank in range(6)])
    for rank in (0, 1, 2, 4):
        found[rank] = replace(found[rank], kernel=f"waits for /data/{rank} in state D")
    assert told(found)[2:5] == (
        "rank 4 on n4: waits for /data/4 in state D",
        "rank 0 on n0: waits for /data/0 in state D",
        "rank 1 on n1: waits for /data/1 in state D",
    )
    alone = views([SLEEP])
    alone[0] = replace(alone[0], kernel="killed and not waited for: its child 9 (sleep) by SIGKILL")
    assert told(alone)[1] == f"rank 0 on n0: {alone[0].kernel}"
