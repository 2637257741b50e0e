"""Choose the next rung of the recovery ladder (pure).

1 restart in place; 2 swap with a spare of the allocation; 3 swap with a standby node of the
standby partition; 4 go on with fewer nodes, where min_nodes allows it; 5 requeue. Stop when the
error is the user's and repeats, or when the budget is spent: recoveries in a row without progress.
Only progress refills it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from robust_slurm.text import counted
from srun_wrapper.decide.bounds import OFF as OFF
from srun_wrapper.decide.bounds import Bounded, bounded, likeliest
from srun_wrapper.decide.bounds import Means as Means
from srun_wrapper.decide.budget import Budget as Budget
from srun_wrapper.decide.budget import acquit as acquit
from srun_wrapper.decide.budget import of_newcomers as of_newcomers
from srun_wrapper.decide.budget import suspect_nodes as suspect_nodes
from srun_wrapper.decide.budget import unproven_nan
from srun_wrapper.decide.budget import with_suspects as with_suspects
from srun_wrapper.decide.crash import AT_START
from srun_wrapper.decide.diagnosis import NEWCOMER, Diagnosis
from srun_wrapper.decide.ends import LIMIT

Action = Literal["restart", "swap_spare", "swap_standby", "shrink", "requeue", "stop"]
GAVE_UP = 120
BUT = "; not with fewer nodes: "
NOTHING_LEFT = 121
REQUEUED = 122
NAN_AGAIN = (
    "the loss is not finite again at the same spot and no machine is proven to be at fault: the "
    "program's own (learning rate, data; if it gets over that by itself, --robust-nan=ignore)"
)


@dataclass(frozen=True, slots=True)
class LadderPlan:
    action: Action
    replace: tuple[str, ...]  # nodes to evict
    why: str
    code: int = 0  # exit code for stop; 0: the failing rank's own
    rung: str = ""  # id of the rung that was chosen
    exchange: str = ""  # a node that exchanges its ranks with another one
    kept: tuple[str, ...] = ()  # suspects that stay only for their copies of snapshots

    @property
    def cause(self) -> str:
        """Return why nothing less than a requeue helps."""
        _, but, why = self.why.partition(BUT)
        nobody = f"no node can replace {','.join(self.replace)}{but}{why}"
        return self.why if self.rung in ("one-world", "undo-resize") else nobody


BACK = LadderPlan("restart", (), "the lost nodes answer again", rung="back")


@dataclass(frozen=True)
class Situation:
    """Facts by which the rungs choose a plan; ``vacant``, ``budget``: see ``plan``."""

    diagnosis: Diagnosis
    vacant: tuple[str, ...]
    budget: Budget
    means: Means

    @cached_property
    def must(self) -> tuple[str, ...]:
        """Nodes to evict in any case."""
        return tuple(dict.fromkeys([*self.vacant, *self.diagnosis.proven]))

    @cached_property
    def evictable(self) -> tuple[str, ...]:
        """Nodes to evict if they can be replaced: suspects, too, the likeliest first."""
        suspects = suspect_nodes(self.diagnosis, self.budget.nodes)
        suspects = likeliest(suspects, self.budget.nodes, self.means.before)
        return tuple(dict.fromkeys([*self.must, *suspects]))

    @cached_property
    def bound(self) -> Bounded:
        """The suspects to evict now, and why the others stay."""
        room = self.means.spares + self.means.standby_nodes
        return bounded(self.evictable, self.must, room, self.means.copies)

    @property
    def evict(self) -> tuple[str, ...]:
        """The nodes that are replaced, the most necessary first."""
        return (*self.must, *self.bound.evict)

    @property
    def repeats(self) -> int:
        """The number of times that this error was seen since the last progress."""
        return self.budget.signatures.get(self.diagnosis.signature, 0)


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung of the ladder. ``choose`` returns None where it does not apply.

    The texts are for people: the condition, and the action.
    """

    id: str
    condition: str
    action: str
    choose: Callable[[Situation], LadderPlan | None]


def plan(diagnosis: Diagnosis, vacant: tuple[str, ...], budget: Budget, means: Means) -> LadderPlan:
    """Choose the next action: the first rung of ``RUNGS`` that applies.

    ``vacant``: nodes that are gone. They and the nodes proven bad must be replaced in any case.
    ``budget`` already includes this failure.
    """
    situation = Situation(diagnosis, vacant, budget, means)
    for rung in RUNGS:
        if (chosen := rung.choose(situation)) is not None:
            return replace(chosen, rung=rung.id)
    raise AssertionError("the last rung always applies")


def _no_start(now: Situation) -> LadderPlan | None:
    return LadderPlan("stop", now.must, now.means.never) if now.means.never else None


def _early(now: Situation) -> LadderPlan | None:
    if not now.means.early or now.evictable:
        return None
    return LadderPlan("stop", (), "it failed before its first step, and no node is to blame")


def _other_code(now: Situation) -> LadderPlan | None:
    other = now.means.other_code
    if not other or now.diagnosis.cause != "user" or now.evictable:
        return None
    return LadderPlan("restart", (), f"the program is to blame: restart with {other}")


def _cannot_run(now: Situation) -> LadderPlan | None:
    root = now.diagnosis.root
    never = not root.launched and not LIMIT.search(root.tail)
    if not never or now.diagnosis.cause == "node" or now.means.stepped:
        return None
    return LadderPlan("stop", (), "the command cannot be run")


def _at_start(now: Situation) -> LadderPlan | None:
    if now.diagnosis.rule != AT_START or now.must:
        return None
    return LadderPlan("stop", (), "the program failed on all ranks before its first step")


def _one_world(now: Situation) -> LadderPlan | None:
    means = now.means
    if not (why := means.one_world(now.diagnosis.root.tail)):
        return None
    if means.world and now.diagnosis.cause == "user":
        return LadderPlan("stop", now.must, f"the program is to blame; {why}", _own_code(now))
    if not means.requeue:
        code = NOTHING_LEFT if now.must else _own_code(now)
        return LadderPlan("stop", now.must, f"{why}, and requeueing is not possible", code)
    if means.requeues >= means.max_restarts:
        times = f"the job was requeued {counted(means.requeues, 'time')}"
        return LadderPlan("stop", now.must, f"{why}, and {times}", _own_code(now))
    return LadderPlan("requeue", now.evictable, why)


def _undo_resize(now: Situation) -> LadderPlan | None:
    if not now.means.resize_failed or not now.means.requeue or now.evictable:
        return None
    return LadderPlan("requeue", (), "the ranks cannot go on in a world of another size")


def _same_error(now: Situation) -> LadderPlan | None:
    if now.diagnosis.cause != "user" or now.repeats < 2:
        return None
    if now.diagnosis.symptom == "nan" or now.diagnosis.ranks:
        return None  # a rank that a signal killed has no error text to compare
    why = "the same error twice without progress: it is the program's own"
    return LadderPlan("stop", (), why, _own_code(now))


def _own_code(now: Situation) -> int:
    """Return 0, for the rank's own exit code, if a rank has ended by itself."""
    return 0 if now.diagnosis.symptom == "crash" else GAVE_UP


def _same_nan(now: Situation) -> LadderPlan | None:
    if now.repeats < 2 or not unproven_nan(now.diagnosis) or now.evictable or _exchange(now):
        return None
    return LadderPlan("stop", (), NAN_AGAIN, GAVE_UP)


def _no_progress(now: Situation) -> LadderPlan | None:
    most = now.means.max_restarts
    if now.diagnosis.proven or now.budget.failures <= most:
        return None
    if now.diagnosis.symptom == "sdc":
        return None  # training went on, and odd ranks are bounded where they are judged
    if now.diagnosis.symptom == "hang":
        return None  # under srun it would wait, too; the watch waits longer each time
    return LadderPlan("stop", (), f"{most} recoveries in a row brought no progress", _own_code(now))


def _exchange(now: Situation) -> LadderPlan | None:
    node = now.diagnosis.root.node
    if now.evictable or not now.diagnosis.exchange:
        return None
    if now.diagnosis.symptom == "sdc":
        why = f"a rank's state was spoilt on {node}: its ranks move to another node"
        return LadderPlan("restart", (), why, exchange=node)
    if now.diagnosis.rule == NEWCOMER:
        why = f"the program, or {node} and the nodes before it: its ranks move to another node"
        return LadderPlan("restart", (), why, exchange=node)
    if now.budget.nodes.get(node, 0) < 2:
        return None
    what = "had a NaN alone again" if now.diagnosis.symptom == "nan" else "died again"
    why = f"a rank on {node} {what} without a known cause: its ranks move to another node"
    return LadderPlan("restart", (), why, exchange=node)


def _in_place(now: Situation) -> LadderPlan | None:
    why = "no node is to blame: restart in place"
    return None if now.evictable else LadderPlan("restart", (), why)


def _spare(now: Situation) -> LadderPlan | None:
    if not 0 < len(now.evict) <= now.means.spares:
        return None
    why = f"a spare of the allocation takes over{now.bound.told}"
    return LadderPlan("swap_spare", now.evict, why, kept=now.bound.kept)


def _standby(now: Situation) -> LadderPlan | None:
    if not 0 < len(now.evict) <= now.means.spares + now.means.standby_nodes:
        return None
    why = f"a node of the standby partition takes over{now.bound.told}"
    return LadderPlan("swap_standby", now.evict, why, kept=now.bound.kept)


def _keep(now: Situation) -> LadderPlan | None:
    if now.must:
        return None
    if now.diagnosis.rule == NEWCOMER:
        why = f"no node left to replace {now.diagnosis.root.node}: its ranks move to another node"
        return LadderPlan("restart", (), why, exchange=now.diagnosis.root.node)
    return LadderPlan("restart", (), "no node left to replace the suspect: restart in place")


def _shrink(now: Situation) -> LadderPlan | None:
    if now.means.not_fewer(now.must):
        return None
    return LadderPlan("shrink", now.must, "no node left to replace it: training goes on with fewer")


def _requeue(now: Situation) -> LadderPlan | None:
    what = "lost" if now.vacant else "bad"
    why = f"no node left to replace the {what} one"
    if (fewer := now.means.not_fewer(now.must)) != OFF:
        why += f"{BUT}{fewer}"
    return LadderPlan("requeue", now.evictable, why) if now.means.requeue else None


def _nothing_left(now: Situation) -> LadderPlan:
    what = "lost" if now.vacant else f"bad ({','.join(now.must)})"
    why = f"a node is {what}, no spare or standby node is left, and requeueing is not possible"
    return LadderPlan("stop", now.evictable, why, NOTHING_LEFT)


RUNGS = (
    Rung("no-start", "the ranks cannot be started again at all", "stop", _no_start),
    Rung(
        "early",
        "without early_restart, in the first minute: no step was seen, no node is to be evicted",
        "stop with the rank's exit code",
        _early,
    ),
    Rung(
        "other-code",
        "the program is to blame, and an update of its code waits, or the code was updated less "
        "than code_trial ago and an earlier version made progress",
        "restart with the update; else, once, roll back to that version",
        _other_code,
    ),
    Rung(
        "cannot-run",
        "the command cannot be started, no node is to blame, and no rank has made a step before",
        "stop",
        _cannot_run,
    ),
    Rung(
        "at-start",
        "all ranks showed the same error before any step, and the program is to blame",
        "stop with the highest exit code of the ranks",
        _at_start,
    ),
    Rung(
        "one-world",
        "the ranks are one MPI world (--mpi=pmi2, pmix), or MPI could not start again",
        "stop if the program is to blame, the job may not be requeued, or it was requeued "
        f"max_restarts times; else requeue without the nodes to evict, exit code {REQUEUED}",
        _one_world,
    ),
    Rung(
        "undo-resize",
        "no node is to be evicted, the job may be requeued, and since it went on with fewer or "
        "more nodes (min_nodes) the ranks have made no step",
        f"requeue, exit code {REQUEUED}",
        _undo_resize,
    ),
    Rung(
        "same-error",
        "the program is to blame, the second time without progress",
        f"stop with the rank's exit code; {GAVE_UP} if no rank ended by itself",
        _same_error,
    ),
    Rung(
        "same-nan",
        "a loss is not finite, the second time without progress, no machine is proven bad, and no "
        "node is to exchange its ranks or to be evicted",
        f"stop with exit code {GAVE_UP}",
        _same_nan,
    ),
    Rung(
        "no-progress",
        "more than max_restarts recoveries in a row without progress, no machine is proven bad, "
        "it is no hang, and no rank's state was spoilt",
        f"stop with the rank's exit code; {GAVE_UP} if no rank ended by itself",
        _no_progress,
    ),
    Rung(
        "exchange",
        "a rank was killed without a known cause, or had a NaN alone, the second time on this "
        "node; or a rank's state was spoilt; or a second node that has just joined shows an error "
        "that no other does",
        "restart; the node exchanges its ranks with another one: the next time shows whether it "
        "follows the rank or the node",
        _exchange,
    ),
    Rung("in-place", "no node is to be evicted", "restart in place", _in_place),
    Rung(
        "spare",
        "enough spares of the allocation for the nodes to evict (see below)",
        "swap them with spares",
        _spare,
    ),
    Rung(
        "standby",
        "enough spares and standby nodes for the nodes to evict (see below)",
        "swap them with standby nodes",
        _standby,
    ),
    Rung(
        "keep",
        "no node is lost or proven bad",
        "restart in place; suspects stay; one that has just joined exchanges its ranks",
        _keep,
    ),
    Rung(
        "shrink",
        "so many nodes stay as min_nodes allows, and whole replicas of the model on them",
        "go on with fewer ranks",
        _shrink,
    ),
    Rung(
        "requeue",
        "the job may be requeued",
        f"requeue without the nodes to evict, exit code {REQUEUED}",
        _requeue,
    ),
    Rung("nothing-left", "always", f"stop with exit code {NOTHING_LEFT}", _nothing_left),
)
