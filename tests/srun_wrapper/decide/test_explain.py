"""robust-srun --robust-explain: its text, and that the rules do what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robust_slurm.config import Config
from srun_wrapper.decide import explain, ladder
from srun_wrapper.decide.diagnose import RULES, diagnose
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.ladder import Budget, Means
from srun_wrapper.decide.local_nan import LocalNan

GOLDEN = Path(__file__).parents[2] / "data" / "explain.txt"
ECC = "CUDA error: uncorrectable ECC error encountered"
EIO = "OSError: [Errno 5] Input/output error"
CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]"
PREEMPTED = "train: received preemption signal from the scheduler"
WORK = (
    "[rank{0}]: [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=81, "
    "OpType=ALLREDUCE, NumelIn={1}, NumelOut={1}, Timeout(ms)=600000) ran for 600010 milliseconds"
)

RETRY = "NET/IB : Got completion from peer n2<41000> with status=12 opcode=0 len=0 vendor err 129"
TAKEN = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 79.11 GiB of which 1.50 GiB is free. Process 999 has 68.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 9.00 GiB memory in use."
)


def end(tail: str = "", rank: int = 0, **fields: Any) -> Failure:
    values: dict[str, Any] = {"code": 1, "rank": rank} | fields
    return Failure("crash", 10.0, 9.9, f"n{rank + 1}", tail=tail, **values)


def nan(rank: int = 0, step: int = 9) -> Failure:
    return Failure("nan", 10.0, 9.0, f"n{rank + 1}", rank, step=step, evidence=("NaN",))


EXAMPLES: dict[str, list[Failure]] = {
    "node-lost": [Failure("node_lost", 10.0, 8.0, "n1", evidence=("silent",))],
    "odd-rank-again": [Failure("sdc", 10.0, 9.0, "n1", 0, suspects=("n1",), again=True)],
    "odd-rank": [Failure("sdc", 10.0, 9.0, "n1", 0, suspects=("n1",))],
    "nan-of-machine": [nan(), end(ECC)],
    "local-nan": [nan()],
    "nan": [nan()],
    "hang-of-collectives": [Failure("hang", 10.0, 0.0, "", evidence=("sizes",), mismatch=True)],
    "hang": [Failure("hang", 10.0, 0.0, "n1", suspects=("n1",))],
    "slow-machine": [Failure("slow", 10.0, 9.0, "n1", suspects=("n1",), evidence=("hot",))],
    "cannot-start-here": [end(code=2, launched=False)],
    "cannot-start-on-many": [end(rank=r, code=2, launched=False) for r in range(3)],
    "preempted": [end(ECC), end(PREEMPTED, 1)],
    "cannot-start": [end(rank=r, code=2, launched=False) for r in range(9)],
    "newcomer-error": [end("FileNotFoundError: [Errno 2] No such file or directory: '/data/0'")],
    "all-at-start": [end("ValueError: x", r) for r in range(9)],
    "shared-error": [end(ECC), end(ECC, 1)],
    "machine-error": [end(ECC)],
    "different-collectives": [end(WORK.format(r, 5 if r == 2 else 9), r) for r in range(4)],
    "points-to-node": [end(EIO)],
    "named-peer": [end(RETRY), end(RETRY, 2)],
    "follows": [end(CLOSED)],
    "gpu-in-use": [end(TAKEN)],
    "host-oom": [end(code=None, signal=9, facts=("Out of memory: Killed process 7 (python)",))],
    "program-error": [end("ValueError: x\nRuntimeError: CUDA error: device-side assert triggered")],
    "killed": [end(code=None, signal=9)],
    "signal": [end(code=None, signal=11)],
    "exit-code": [end(code=3)],
}
LOCAL = LocalNan("n1", ("rank 0",), ("rank 0",), 9, 8)
PLANS = {  # the actions of the first and of the second time, and the nodes that leave
    "evict": (("swap_spare", ("n1",)), ("swap_spare", ("n1",))),
    "second": (("restart", ()), ("swap_spare", ("n1",))),
    "exchange": (("restart", ()), ("restart", ())),
    "exchange nan": (("restart", ()), ("restart", ())),
    "exchange sdc": (("restart", ()), ("restart", ())),
    "test first": (("restart", ()), ("swap_spare", ("n1",))),
    "test only": (("restart", ()), ("restart", ())),
    "test": (("restart", ()), ("stop", ())),
    "stop": (("restart", ()), ("stop", ())),
    "stop now": (("stop", ()), ("stop", ())),
    "restart": (("restart", ()), ("restart", ())),
}


def test_every_rule_has_an_example() -> None:
    assert list(EXAMPLES) == [rule.id for rule in RULES]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_the_ladder_does_what_is_printed_of_a_rule(rule: Any) -> None:
    """Without tests of the machines; these come before the second time."""
    budget, plans = Budget(), []
    for _ in range(2):
        local = LOCAL if rule.id == "local-nan" else None
        new = {"n1"} if rule.id == "newcomer-error" else ()
        start = rule.id == "all-at-start"
        found = diagnose(
            EXAMPLES[rule.id], 9, new, addresses={"n2": "n2"}, local=local, none_started=start
        )
        assert found.rule == ("machine-error" if rule.id == "nan-of-machine" else rule.id)
        budget.spend(found)
        vacant = ("n1",) if found.symptom == "node_lost" else ()
        plan = ladder.plan(found, vacant, budget, Means(9, 0, False, 3))
        plans.append((plan.action, plan.replace))
    assert tuple(plans) == PLANS[rule.then]


OTHER_CODE = Means(1, 0, True, 3, other_code="code c-1")


def found(example: str, **changes: Any) -> Diagnosis:
    return replace(diagnose(EXAMPLES[example], 9), **changes)


AT_START = diagnose(EXAMPLES["all-at-start"], 9, none_started=True)


@pytest.mark.parametrize(
    ("diagnosis", "times", "vacant", "means", "rung"),
    [
        (found("machine-error"), 1, (), Means(1, 0, True, 3, "stdin is used up"), "no-start"),
        (found("cannot-start"), 1, (), OTHER_CODE, "other-code"),
        (found("exit-code"), 2, (), OTHER_CODE, "other-code"),
        (AT_START, 1, (), OTHER_CODE, "other-code"),
        (AT_START, 1, (), Means(1, 0, True, 3), "at-start"),
        (AT_START, 1, ("n2",), Means(1, 0, True, 3), "spare"),
        (found("machine-error"), 1, (), OTHER_CODE, "spare"),
        (found("exit-code"), 1, ("n2",), OTHER_CODE, "spare"),
        (found("cannot-start"), 1, (), Means(1, 0, True, 3), "cannot-run"),
        (found("cannot-start"), 1, (), Means(1, 0, True, 3, stepped=True), "in-place"),
        (found("cannot-start"), 2, (), Means(1, 0, True, 3, stepped=True), "same-error"),
        (found("cannot-start-on-many"), 1, (), Means(1, 0, True, 3), "cannot-run"),
        (found("cannot-start-on-many"), 3, (), Means(1, 0, True, 3, stepped=True), "in-place"),
        (found("cannot-start-on-many"), 4, (), Means(1, 0, True, 3, stepped=True), "no-progress"),
        (found("exit-code"), 2, (), Means(1, 0, True, 3), "same-error"),
        (found("nan"), 2, (), Means(1, 0, True, 3), "same-nan"),
        (found("follows"), 4, (), Means(1, 0, True, 3), "no-progress"),
        (found("killed"), 2, (), Means(1, 0, True, 3), "exchange"),
        (found("killed"), 1, (), Means(1, 0, True, 3), "in-place"),
        (found("odd-rank"), 1, (), Means(1, 0, True, 3), "exchange"),
        (found("odd-rank"), 3, (), Means(1, 0, True, 3), "exchange"),
        (found("odd-rank", cause="node", proven=("n1",)), 1, (), Means(1, 0, True, 3), "spare"),
        (found("odd-rank-again"), 1, (), Means(1, 0, True, 3), "spare"),
        (found("killed"), 3, (), Means(1, 0, True, 3), "spare"),
        (found("follows"), 3, (), Means(1, 0, True, 3), "in-place"),
        (found("machine-error"), 1, (), Means(1, 1, True, 3), "spare"),
        (found("machine-error"), 1, (), Means(0, 1, True, 3), "standby"),
        (found("machine-error"), 1, ("n2",), Means(1, 0, True, 3), "spare"),
        (found("machine-error"), 1, ("n2",), Means(0, 1, True, 3), "standby"),
        (found("machine-error"), 1, (), Means(0, 0, True, 3), "keep"),
        (found("machine-error", proven=("n1",)), 4, (), Means(0, 0, True, 3), "requeue"),
        (found("machine-error", proven=("n1",)), 4, (), Means(0, 0, False, 3), "nothing-left"),
    ],
)
def test_each_rung(
    diagnosis: Diagnosis, times: int, vacant: tuple[str, ...], means: Means, rung: str
) -> None:
    budget = Budget()
    for _ in range(times):
        budget.spend(diagnosis)
    assert ladder.plan(diagnosis, vacant, budget, means).rung == rung
    assert rung in [each.id for each in ladder.RUNGS]


def test_the_text() -> None:
    """After a change of a rule: python -m srun_wrapper.cli --robust-explain, see the file."""
    lines = explain.explain(Config())
    assert "\n".join(lines) + "\n" == GOLDEN.read_text()
    assert max(map(len, lines)) <= explain.WIDTH


def test_the_limits_are_those_in_force() -> None:
    config = replace(Config(), stop_tests=0.0, replay=20, max_restarts=7, hang=False)
    text = "\n".join(explain.explain(config))
    assert "the node is evicted the second time" in text and "tests of the machines (" not in text
    assert "off (stop_tests = 0)" in text and "off (replay = 0)" not in text
    for line in ("max_restarts = 7", "replay = 20 steps", "hang = off", "stop_tests = 0 s"):
        assert f"  {line}\n" in text
