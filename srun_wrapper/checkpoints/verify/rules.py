"""Rules for checked steps: when, on which nodes, and what follows from the results (pure).

Why so: docs/decisions/0035-certified-steps.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from robust_slurm.checkpoint.format.state_sum import StateSum
from srun_wrapper.command.input_rules import StdinFeed

LIMIT = 60.0  # s for the slowest rank to come to a step at which others stand already
STEPS = 10  # or so many steps, where these take longer
MISSED = 2  # steps in a row that could not be computed again: the checks are switched off
UNPROVEN = 2  # results in a row that depend on the node, without a proof: likewise
SHOWN = 8  # ranks that are named

Results = Mapping[int, StateSum]  # by rank
Verdict = Literal["same", "differ", "unknown"]
Standing = Literal["wait", "all", "over"]


class SeatState(NamedTuple):
    """One place and the node that has it; of a spare ``ranks`` is 0."""

    node: str
    slots: int
    ranks: int
    pod: str = ""
    """Location in the network; see --robust-place."""


def refused(*, tasks: bool, checkpoint: bool, nodes: int, numbered: bool, source: StdinFeed) -> str:
    """Reason why no step of such a job can be computed again on other nodes; empty if one can.

    ``tasks``: the tasks are independent of each other; ``nodes``: the most that its step can have;
    ``numbered``: torchrun numbers the nodes, not robust-srun; ``source``: of its input.
    """
    if tasks:
        return "independent tasks (--robust-no-rank-env) have no steps in common"
    if not checkpoint:
        return "it needs checkpoints in memory, and --robust-no-checkpoint turns them off"
    if nodes < 2:
        return ONE_NODE
    if numbered:
        return (
            "this torchrun numbers its nodes itself, so that ranks cannot be moved: "
            "use --rdzv-backend=static"
        )
    if source in (StdinFeed.ONE, StdinFeed.OWN):
        return f"stdin goes to {source.value}: a rank that moves to another node would lose it"
    return ""


ONE_NODE = "a step is recomputed on other nodes, and this job has only one node"
UNEVEN = "some node has no partner with as many ranks, nor a spare with room for them"


def exchange(places: Sequence[SeatState], spares: Sequence[SeatState] = ()) -> list[str] | None:
    """Return the next node of each place, another one than now; None where there is none.

    Places with as many ranks change in a ring, within a part of the network where each part has
    two; one without such a partner is given to a spare.
    """
    found = [seat.node for seat in places]
    free = list(spares)
    sizes: dict[int, list[int]] = {}
    for place, seat in enumerate(places):
        sizes.setdefault(seat.ranks, []).append(place)
    for ranks, alike in sizes.items():
        if len(alike) == 1:
            (place,) = alike
            spare = next((each for each in free if each.slots >= ranks), None)
            if spare is None:
                return None
            free.remove(spare)
            found[place] = spare.node
            continue
        pods: dict[str, list[int]] = {}
        for place in alike:
            pods.setdefault(places[place].pod, []).append(place)
        rings = list(pods.values())
        if any(len(ring) < 2 for ring in rings):
            rings = [alike]
        for ring in rings:
            for place, other in zip(ring, [*ring[1:], ring[0]], strict=True):
                found[place] = places[other].node
    return found


def next_step(newest: int, ahead: int, every: int) -> int:
    """Return the multiple of ``every`` that all ranks hear of in time: ``ahead`` steps from now."""
    return -(-(newest + ahead) // every) * every


def standing(
    saved: Mapping[int, int], world: int, step: int, waited: float, step_time: float | None
) -> Standing:
    """Judge if all ranks stand at ``step``. ``saved``: the newest step of each; ``waited``: s since
    the first stood there."""
    if any(newest > step for newest in saved.values()):
        return "over"
    if len(saved) >= world > 0 and all(newest == step for newest in saved.values()):
        return "all"
    return "over" if waited > max(LIMIT, STEPS * (step_time or 0.0)) else "wait"


def compare(one: Results, two: Results) -> tuple[Verdict, str]:
    """Hold two results of the same step against each other, and say in what they differ.

    Unknown where they are not of the same ranks, or where a rank kept another part of the state.
    """
    if not one or one.keys() != two.keys():
        return "unknown", "not all ranks have reported their results"
    apart = [rank for rank in one if one[rank].parts != two[rank].parts]
    if apart:
        return "unknown", f"{_ranks(apart)} kept another part of the state"
    tensors = [rank for rank in one if one[rank].tensors != two[rank].tensors]
    values = [rank for rank in one if one[rank].values != two[rank].values]
    if not tensors and not values:
        return "same", ""
    parts = [f"tensors of {_ranks(tensors)}"] if tensors else []
    parts += [f"other values (loader, schedule, extra) of {_ranks(values)}"] if values else []
    return "differ", " and ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ",".join(map(str, sorted(ranks)[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank {shown}{more}"


Conclusion = Literal["agree", "again", "program", "machine", "once", "unknown"]


def conclude(first: Results, second: Results, third: Results | None = None) -> Conclusion:
    """Compare the results of a step: the first, that of other nodes, and if needed a second one of
    the first nodes.

    ``again``: a third is needed. ``program``: it does not compute the same twice. ``machine``: what
    it computes depends on the node. ``once``: two sets of nodes agree to the bit, so the program is
    deterministic, and the first nodes computed wrongly the first time only.
    """
    verdict, _ = compare(first, second)
    if verdict == "unknown":
        return "unknown"
    if verdict == "same":
        return "agree"
    if third is None:
        return "again"
    last, _ = compare(first, third)
    if last == "unknown":
        return "unknown"
    if last == "same":
        return "machine"
    return "once" if compare(second, third)[0] == "same" else "program"
