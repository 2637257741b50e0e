"""Errors on nodes that have just joined: theirs, until another node shows them, too."""

from __future__ import annotations

import pytest

from srun_wrapper.decide import ladder
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.ladder import Budget, LadderPlan, Means

NO_SCRIPT = "python: can't open file '/home/u/train.py': [Errno 2] No such file or directory"
NO_DATA = "FileNotFoundError: [Errno 2] No such file or directory: '/data/tokens'"
NO_MODULE = "ModuleNotFoundError: No module named 'flash_attn'"
NO_LIBRARY = "ImportError: libcudart.so.12: cannot open shared object file"
NO_LICENSE = "SystemExit: no license server"
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]"
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
MEANS = Means(0, 64, True, 3)


def end(
    tail: str,
    node: str = "s1",
    rank: int = 1,
    at: float = 10.0,
    code: int | None = 1,
    signum: int | None = None,
    facts: tuple[str, ...] = (),
) -> Failure:
    return Failure(
        "crash", at, at - 0.1, node, rank, None if signum else code, signum, tail, facts=facts
    )


@pytest.mark.parametrize(
    "failure",
    [
        end(NO_SCRIPT, code=2),
        end(NO_DATA),
        end(NO_MODULE),
        end(NO_LIBRARY),
        end(NO_LICENSE, code=7),
        end("", code=3),
        end("bash: nvcc: command not found", code=127),
        end("bash: ./train: Permission denied", code=126),
        end("", signum=4),
        end("", signum=11),
        end("", signum=9, facts=("Out of memory: Killed process 7 (python)",)),
    ],
)
def test_an_error_that_only_a_newcomer_shows_is_its_own(failure: Failure) -> None:
    after = end(CLOSED, "n1", 0, 10.2)
    found = diagnose([failure, after], 2, {"s1"})
    assert (found.rule, found.cause, found.suspects) == ("newcomer-error", "node", ("s1",))
    assert found.proven == () and found.tests == "never"
    plan = ladder.plan(found, (), Budget(), MEANS)
    assert (plan.action, plan.replace) == ("swap_standby", ("s1",))
    assert diagnose([failure, after], 2).rule != "newcomer-error"  # of a node that has long run


@pytest.mark.parametrize(
    ("failures", "rule"),
    [
        ([end(NO_DATA), end(NO_DATA, "n1", 0, 10.4)], "program-error"),  # an old member, too
        ([end(NO_DATA, "n1", 0, 9.9), end("ValueError: peer")], "program-error"),  # it was first
        ([end("", signum=9)], "killed"),  # somebody did it
        ([end(CLOSED), end(CLOSED, "n1", 0)], "follows"),
        ([end(ECC)], "machine-error"),
    ],
)
def test_what_is_not_a_newcomers_own(failures: list[Failure], rule: str) -> None:
    assert diagnose(failures, 2, {"s1"}).rule == rule


def test_several_newcomers_leave_together() -> None:
    found = diagnose([end(NO_DATA), end(NO_DATA, "s2", 2)], 4, {"s1", "s2"})
    assert found.suspects == ("s1", "s2")


class Story:
    """One error after another, judged as a recovery does it."""

    def __init__(self, means: Means = MEANS) -> None:
        self.budget, self.means, self.at = Budget(), means, 0.0
        self.withdrawn: set[str] = set()

    def fails(
        self, node: str, rank: int = 1, *, new: bool = True, tail: str = NO_DATA
    ) -> tuple[Diagnosis, LadderPlan]:
        self.at += 1.0
        failure = end(tail, node, rank, self.at)
        found = diagnose([failure], 2, {node} if new else ())
        return self.judged(found, spend=True)

    def judged(self, found: Diagnosis, *, spend: bool) -> tuple[Diagnosis, LadderPlan]:
        found = ladder.of_newcomers(found, self.budget)
        if found.cause != "node" and spend:
            self.budget.spend(found)
        found, wrong = ladder.acquit(found, self.budget)
        self.withdrawn.update(wrong)
        return found, ladder.plan(found, (), self.budget, self.means)

    def swapped(self, found: Diagnosis, old: str, new: str) -> None:
        self.budget.evict(found, [(old, new)], ())


def test_at_the_second_newcomer_the_ranks_move_and_the_program_is_found_to_blame() -> None:
    story = Story()
    found, plan = story.fails("s1")
    assert plan.replace == ("s1",) and story.budget.failures == 0
    story.swapped(found, "s1", "s2")
    found, plan = story.fails("s2")
    assert (plan.rung, plan.exchange, plan.replace) == ("exchange", "s2", ())
    found, plan = story.fails("n1", new=False)
    assert (found.cause, plan.action, plan.code) == ("user", "stop", 0)
    assert story.withdrawn == {"s1", "s2"}


def test_the_error_stays_on_the_newcomer_without_the_ranks() -> None:
    """Both standby nodes lack it: the second is proven unfit, and a third is asked for."""
    story = Story()
    found, _plan = story.fails("s1")
    story.swapped(found, "s1", "s2")
    story.fails("s2")
    found, plan = story.fails("s2", 0)
    assert (found.proven, plan.action, plan.replace) == (("s2",), "swap_standby", ("s2",))
    assert not story.withdrawn


def test_ranks_that_cannot_move_end_the_job_with_the_programs_own_code() -> None:
    story = Story()
    found, _plan = story.fails("s1")
    story.swapped(found, "s1", "s2")
    assert story.fails("s2")[1].rung == "exchange"
    found, plan = story.fails("s2")
    assert (found.cause, plan.action, plan.code) == ("user", "stop", 0)


def test_without_another_node_the_ranks_of_the_first_move() -> None:
    story = Story(Means(0, 0, True, 3))
    _found, plan = story.fails("s1")
    assert (plan.rung, plan.exchange, plan.replace) == ("keep", "s1", ())
    found, plan = story.fails("s1", 0)
    assert (found.proven, plan.action) == (("s1",), "requeue")


def test_another_error_on_the_next_newcomer_is_its_own_again() -> None:
    story = Story()
    found, _plan = story.fails("s1")
    story.swapped(found, "s1", "s2")
    _found, plan = story.fails("s2", tail=NO_MODULE)
    assert (plan.action, plan.replace) == ("swap_standby", ("s2",))


def test_a_failure_that_is_looked_at_twice_counts_once() -> None:
    story = Story()
    raw = diagnose([end(NO_DATA)], 2, {"s1"})
    for _ in range(2):
        found, plan = story.judged(raw, spend=False)
        assert (found.suspects, plan.replace) == (("s1",), ("s1",))
