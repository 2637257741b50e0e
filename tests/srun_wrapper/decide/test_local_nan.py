"""A loss that is not finite on one machine's ranks alone: the machine, or these ranks' data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from srun_wrapper.decide.budget import Budget, acquit
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.ladder import GAVE_UP, Means, plan
from srun_wrapper.decide.local_nan import LocalNan, Losses, locate

ALL = range(8)  # two ranks a node


def losses(**changed: tuple[int | None, int | None]) -> list[Losses]:
    """Losses of 8 ranks: finite at step 41; r5=(bad, finite) changes rank 5's."""
    known = {f"r{rank}": (None, 41) for rank in ALL} | changed
    return [Losses(f"rank {r}", f"n{r // 2 + 1}", *known[f"r{r}"]) for r in ALL]


SPREAD = {f"r{rank}": (42, 41) for rank in ALL}


@pytest.mark.parametrize(
    ("seen", "node", "ranks"),
    [
        (losses(r5=(41, 40)), "n3", ("rank 5",)),
        (losses(r4=(41, 40), r5=(41, 40)), "n3", ("rank 4", "rank 5")),
        # From the next step on all have it: gradients are summed.
        (losses(**SPREAD | {"r5": (41, 40)}), "n3", ("rank 5",)),
        (losses(**SPREAD | {"r5": (41, None)}), "n3", ("rank 5",)),
        (losses(r5=(41, 40), r2=(43, 42)), "n3", ("rank 5",)),
        # All at once: a loss that is averaged over the ranks, the model, the learning rate.
        (losses(**dict.fromkeys(SPREAD, (41, 40))), "", ()),
        (losses(r1=(41, 40), r5=(41, 40)), "", ()),
        # Of a rank nothing is known at that step: it lags, has no loss, or had a NaN before.
        (losses(r5=(41, 40), r2=(None, 40)), "", ()),
        (losses(r5=(41, 40), r2=(None, None)), "", ()),
        (losses(r5=(41, 40), r2=(42, None)), "", ()),
        (losses(r5=(41, 40), r4=(42, 40)), "", ()),
        (losses(r5=(None, None)), "", ()),
        (losses(), "", ()),
        (losses(r5=(41, 40))[4:6], "", ()),  # there is no other node
        ([], "", ()),
    ],
)
def test_the_ranks_that_had_it_alone(seen: list[Losses], node: str, ranks: tuple[str, ...]) -> None:
    for order in (seen, seen[::-1]):
        found = locate(order)
        if not node:
            assert found is None
            continue
        assert found is not None
        assert (found.node, sorted(found.ranks), found.step) == (node, list(ranks), 41)
        assert found.finite == 8 - len(ranks) and len(found.held) == 2


def test_the_line_of_evidence() -> None:
    assert LocalNan("n3", ("rank 5",), (), 41, 7).line() == (
        "only rank 5 on n3 had a loss that is not finite at step 41; the losses of the other 7 "
        "ranks were finite at that step"
    )
    assert LocalNan("n1", ("rank 0", "rank 1"), (), 9, 1).line() == (
        "only ranks 0, 1 on n1 had a loss that is not finite at step 9; the 1 other rank's loss "
        "was finite at that step"
    )


def local(node: str, *ranks: int, held: tuple[int, ...] = (), step: int = 41) -> Diagnosis:
    """The diagnosis of a NaN that these ranks had alone; they all have it a step later."""
    seen = [
        Failure("nan", 1.0, 0.5, node, r, step=step, evidence=(f"loss of rank {r}",)) for r in ranks
    ]
    later = replace(seen[0], node="n9", rank=99, step=step + 1, evidence=())
    names = [tuple(f"rank {r}" for r in numbers) for numbers in (ranks, held or ranks)]
    return diagnose([later, *seen], 4, local=LocalNan(node, *names, step, 6))


def everywhere(step: int = 41) -> Diagnosis:
    return diagnose([Failure("nan", 1.0, 0.5, f"n{n}", n, step=step) for n in range(1, 5)], 4)


def unsure(node: str, rank: int, step: int = 41) -> Diagnosis:
    """One rank had it a step before another; what the others had at that step is not known."""
    seen = [(node, rank, step), ("n9", 99, step + 1)]
    return diagnose([Failure("nan", 1.0, 0.5, n, r, step=s) for n, r, s in seen], 4)


N2 = local("n2", 2, 3)
FOLLOWED = "it follows rank 2, rank 3 from n2 to n3: the program, or the data of rank 2, rank 3"
STAYED = "it stays on n2, whose ranks had moved to another node"
AGAIN = "again at step 41, on no rank alone: the program or its data"


@pytest.mark.parametrize(
    ("history", "rungs", "cause", "suspects", "last"),
    [
        ([N2], ["in-place"], "unknown", ("n2",), None),
        ([N2] * 2, ["in-place", "exchange"], "unknown", ("n2",), None),
        ([N2, N2, local("n2", 4, 5)], ["in-place", "exchange", "spare"], "node", ("n2",), STAYED),
        ([N2, N2, local("n3", 2, 3)], ["in-place", "exchange", "same-nan"], "user", (), FOLLOWED),
        # No node could take its ranks: nothing tells the machine from their data.
        ([N2] * 3, ["in-place", "exchange", "same-nan"], "unknown", (), None),
        # Another rank of the same node, while all ranks are where they were.
        ([local("n2", 2, held=(2, 3)), local("n2", 3, held=(2, 3))], ["in-place", "exchange"],
         "unknown", ("n2",), None),
        # On other ranks of another node, or on all ranks at once.
        ([N2, local("n3", 4, 5)], ["in-place", "same-nan"], "unknown", ("n3",), None),
        ([N2, everywhere()], ["in-place", "same-nan"], "unknown", (), None),
        ([everywhere(), N2], ["in-place", "same-nan"], "unknown", ("n2",), None),
        ([everywhere()] * 2, ["in-place", "same-nan"], "user", (), AGAIN),
        ([everywhere(), everywhere(40)], ["in-place", "same-nan"], "unknown", (), None),
        # Its ranks have not moved; which ranks had it the first time is not known for sure.
        ([unsure("n2", 2), N2], ["in-place", "same-nan"], "unknown", ("n2",), None),
        ([unsure("n2", 2)] * 2, ["in-place", "same-nan"], "unknown", (), None),
    ],
)  # fmt: skip
def test_what_follows(
    history: list[Diagnosis],
    rungs: list[str],
    cause: str,
    suspects: tuple[str, ...],
    last: str | None,
) -> None:
    """Without progress in between, with a spare; only a node of cause "node" leaves."""
    budget, chosen = Budget(), []
    for each in history:
        budget.spend(each)
        found, withdrawn = acquit(each, budget)
        assert not withdrawn
        chosen.append(plan(found, (), budget, Means(1, 0, False, 3)))
    assert [each.rung for each in chosen] == rungs
    assert (found.cause, found.suspects) == (cause, suspects)
    assert last is None or found.evidence[-1] == last
    final = chosen[-1]
    assert final.replace == (suspects if cause == "node" else ())
    assert final.code == (GAVE_UP if final.rung == "same-nan" else 0)


@pytest.mark.parametrize(
    ("then", "withdrawn"),
    [(local("n3", 6, 7), ("n2",)), (local("s1", 8, 9), ("n2",)), (everywhere(), ())],
)
def test_a_nan_without_the_node_that_left_acquits_it(
    then: Diagnosis, withdrawn: tuple[str, ...]
) -> None:
    """Unless all have it at once: the state may be spoilt by now."""
    budget = Budget()
    for each in (N2, N2, local("n2", 4, 5)):
        budget.spend(each)
        found, _ = acquit(each, budget)
    budget.evict(found, [("n2", "s1")], ())
    budget.spend(then)
    judged, wrong = acquit(then, budget)
    assert wrong == withdrawn and not judged.suspects
    assert plan(judged, (), budget, Means(1, 0, False, 9)).rung == "same-nan"


def test_a_launchers_ranks_are_not_followed() -> None:
    """A torchrun may give its ranks other numbers after an exchange: nobody can leave for them."""
    names = ("local rank 0",)
    found = diagnose(
        [Failure("nan", 1.0, 0.5, "n2", -1, step=41)], 4, local=LocalNan("n2", names, names, 41, 6)
    )
    budget = Budget()
    for rung in ("in-place", "same-nan"):
        budget.spend(found)
        judged, _ = acquit(found, budget)
        assert (judged.cause, judged.suspects) == ("unknown", ("n2",))
        assert plan(judged, (), budget, Means(1, 0, False, 3)).rung == rung


def test_progress_forgets_it() -> None:
    budget = Budget()
    for _ in range(5):
        budget.refill()
        budget.spend(N2)
        assert plan(acquit(N2, budget)[0], (), budget, Means(1, 0, False, 3)).rung == "in-place"


@pytest.mark.parametrize("signum", [9, 11, 6])
def test_an_end_by_a_signal_that_follows_its_rank(signum: int) -> None:
    def died(node: str, rank: int) -> Diagnosis:
        return diagnose([Failure("crash", 1.0, 0.9, node, rank, signal=signum)], 4)

    budget = Budget()
    for node, rung in (
        ("n2", "in-place"),
        ("n2", "exchange"),
        ("n3", "in-place"),
        ("n3", "no-progress"),
    ):
        budget.spend(died(node, 3))
        found, _ = acquit(died(node, 3), budget)
        assert plan(found, (), budget, Means(1, 0, False, 3)).rung == rung
    assert found.cause == "user" and not found.suspects
    assert found.evidence[-1] == (
        "it follows rank 3 from n2 to n3: the program, or the data of rank 3"
    )
    other = Budget()
    for node, rank in (("n2", 3), ("n3", 4)):
        other.spend(died(node, rank))
        found, _ = acquit(died(node, rank), other)
    assert found.cause == "shared"  # two ranks on two nodes
