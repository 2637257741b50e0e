"""The number of slots that snapshots and replicas need, by every reachable state of a small world.

Ranks train in steps, copy each state in the background, and their stores send it to a replica;
only the waiting rules of the checkpointer order these. In every state that can be reached, a crash
must leave one step that every rank has, and not more than one step behind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pytest

LAST = 6  # steps: enough for every slot to be used twice

COPYING, COPIED, KEPT, SENDING, REPLICATED = range(5)


class Rank(NamedTuple):
    """One rank and its store."""

    step: int  # of the state in its memory: optimizer steps done
    at: int  # 0: in save(step), waiting; n: before the n-th action of its program
    phase: int  # of the newest snapshot
    own: tuple[int, ...]  # steps of complete snapshots
    replica: tuple[int, ...]  # steps of complete replicas, at the holder


State = tuple[Rank, ...]
Action = tuple[str, str]
Programs = tuple[tuple[Action, ...], ...]
START = Rank(step=0, at=1, phase=REPLICATED, own=(0,), replica=(0,))


class World(NamedTuple):
    own_slots: int
    replica_slots: int
    programs: Programs
    """The program of each rank between save(s) returning and optimizer step s + 1."""
    hook_waits_for_replica: bool
    waits_for_all: bool = False
    """A copy begins only when all ranks have the step before, and its replicas."""


def all_reduce(ranks: int) -> Programs:
    """Every rank gives a gradient and needs all of them."""
    return tuple(
        (("give", f"gradient {r}"), *(("take", f"gradient {o}") for o in range(ranks) if o != r))
        for r in range(ranks)
    )


PIPELINE: Programs = (
    (("give", "activation"), ("take", "gradient")),
    (("take", "activation"), ("give", "gradient")),
)


def begin(slots: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the slots that stay complete while one, the oldest, is being overwritten."""
    return slots if len(slots) < count else slots[1:]


def moves(world: World, state: State, r: int) -> Iterator[Rank]:
    """Yield the next states of rank ``r`` or its store."""
    rank, program = state[r], world.programs[r]
    done = rank.phase == REPLICATED
    if rank.at == 0:
        all_have = min(max(other.replica) for other in state)
        if done and (not world.waits_for_all or all_have >= rank.own[-1]):  # save(s)
            # The last snapshot is kept and replicated; the next copy begins.
            yield rank._replace(at=1, phase=COPYING, own=begin(rank.own, world.own_slots))
    elif rank.at <= len(program):
        verb, what = program[rank.at - 1]
        if verb == "give" or given(world, state, what, rank.step):
            yield rank._replace(at=rank.at + 1)
    elif rank.step < LAST and rank.phase >= COPIED and (done or not world.hook_waits_for_replica):
        yield rank._replace(at=0, step=rank.step + 1)
    # The snapshot in work is of this step, or of the one before while save() waits.
    step = rank.step if rank.at else rank.step - 1
    match rank.phase:
        case 0:
            yield rank._replace(phase=COPIED, own=(*rank.own, step))
        case 1:
            yield rank._replace(phase=KEPT)
        case 2:
            yield rank._replace(phase=SENDING, replica=begin(rank.replica, world.replica_slots))
        case 3:
            yield rank._replace(phase=REPLICATED, replica=(*rank.replica, step))


def given(world: World, state: State, what: str, step: int) -> bool:
    """Return whether the message of this step is on its way."""
    for rank, program in zip(state, world.programs, strict=True):
        if ("give", what) in program:
            return rank.step > step or (
                rank.step == step and rank.at > program.index(("give", what)) + 1
            )
    raise AssertionError(what)


@functools.cache
def reachable(world: World) -> frozenset[State]:
    start: State = (START,) * len(world.programs)
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for r in range(len(state)):
            for rank in moves(world, state, r):
                new = (*state[:r], rank, *state[r + 1 :])
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
    return frozenset(seen)


class Loss(NamedTuple):
    own: frozenset[int]  # ranks whose own snapshots are lost
    replica: frozenset[int]  # ranks whose replicas are lost


PROCESS = Loss(frozenset(), frozenset())  # of any rank: its store has everything complete


def node_loss(node: Mapping[int, str], holder: Mapping[int, int], lost: str) -> Loss:
    return Loss(
        frozenset(r for r in node if node[r] == lost),
        frozenset(r for r in node if node[holder[r]] == lost),
    )


def left(state: State, loss: Loss) -> int | None:
    """The newest step that every rank still has somewhere; None: there is none."""
    common: set[int] | None = None
    for r, rank in enumerate(state):
        has = set() if r in loss.own else set(rank.own)
        has |= set() if r in loss.replica else set(rank.replica)
        common = has if common is None else common & has
    return max(common or set(), default=None)


def returned(state: State) -> int:
    """The newest step for which save() has returned on every rank."""
    return min(rank.step if rank.at else rank.step - 1 for rank in state)


def stepped(state: State) -> int:
    """The newest step that every rank's optimizer has done."""
    return min(rank.step for rank in state)


def worst(
    states: frozenset[State], losses: list[Loss], reached: Callable[[State], int]
) -> int | None:
    """The most steps that any crash costs; None: one leaves nothing that all ranks have."""
    most = 0
    for state in states:
        for loss in losses:
            step = left(state, loss)
            if step is None:
                return None
            most = max(most, reached(state) - step)
    return most


TWO = {0: "n0", 1: "n1"}
SWAPPED = {0: 1, 1: 0}
# Two ranks on one node, which holds the replica of the third.
THREE = {0: "n0", 1: "n0", 2: "n1"}
BACK = {0: 2, 1: 2, 2: 0}


def one_rank_each() -> list[Loss]:
    return [PROCESS, *(node_loss(TWO, SWAPPED, n) for n in ("n0", "n1"))]


def two_ranks_on_a_node() -> list[Loss]:
    return [PROCESS, *(node_loss(THREE, BACK, n) for n in ("n0", "n1"))]


@pytest.mark.parametrize("programs", [all_reduce(2), PIPELINE], ids=["all-reduce", "pipeline"])
def test_two_own_slots_can_leave_no_common_step(programs: Programs) -> None:
    states = reachable(World(2, 3, programs, hook_waits_for_replica=False))
    assert any(
        left(state, Loss(frozenset(), frozenset((0, 1)))) is None for state in states
    )  # nothing but own snapshots


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("programs", [all_reduce(2), PIPELINE], ids=["all-reduce", "pipeline"])
def test_two_replica_slots_can_leave_no_common_step(programs: Programs, hook: bool) -> None:
    """One's node dies: its replica has s, s + 1 was on its way over s - 1; the other copies s.

    That the optimizer waits for the replica too changes nothing: the other one is not waited for.
    """
    states = reachable(World(3, 2, programs, hook))
    assert worst(states, [PROCESS], returned) == 1
    assert worst(states, one_rank_each(), returned) is None


@pytest.mark.parametrize("programs", [all_reduce(2), PIPELINE], ids=["all-reduce", "pipeline"])
def test_three_own_and_three_replica_slots_always_leave_one(programs: Programs) -> None:
    states = reachable(World(3, 3, programs, hook_waits_for_replica=False))
    assert worst(states, one_rank_each(), returned) == 1
    assert worst(states, [PROCESS], stepped) == 1


@pytest.mark.parametrize("programs", [all_reduce(2), PIPELINE], ids=["all-reduce", "pipeline"])
def test_two_and_two_do_where_each_step_waits_for_all_ranks(programs: Programs) -> None:
    states = reachable(World(2, 2, programs, hook_waits_for_replica=False, waits_for_all=True))
    assert worst(states, one_rank_each(), returned) == 1
    assert any(stepped(state) == LAST for state in states)


@pytest.mark.slow
def test_two_and_two_do_when_one_loss_takes_two_ranks() -> None:
    states = reachable(World(2, 2, all_reduce(3), True, waits_for_all=True))
    assert worst(states, two_ranks_on_a_node(), returned) == 1


@pytest.mark.slow
def test_they_do_also_when_one_loss_takes_two_ranks() -> None:
    states = reachable(World(3, 3, all_reduce(3), hook_waits_for_replica=False))
    losses = two_ranks_on_a_node()
    assert worst(states, losses, returned) == 1
    # The state that save() was waiting to save is lost as well.
    assert worst(states, losses, stepped) == 2


@pytest.mark.slow
def test_a_hook_that_waits_for_the_replica_loses_one_optimizer_step_at_most() -> None:
    states = reachable(World(3, 3, all_reduce(3), hook_waits_for_replica=True))
    assert worst(states, two_ranks_on_a_node(), stepped) == 1


@pytest.mark.slow
def test_the_model_reaches_the_last_step() -> None:
    states = reachable(World(3, 3, all_reduce(3), hook_waits_for_replica=False))
    assert any(stepped(state) == LAST for state in states)
    assert len(states) > 5_000
