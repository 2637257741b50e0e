"""The ladder under --mpi=pmi2 or pmix: an MPI world is not started again in the step."""

from __future__ import annotations

from typing import Any

import pytest

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.ladder import NOTHING_LEFT, Budget, Means, plan


def crash(tail: str = "", **fields: Any) -> Diagnosis:
    return diagnose([Failure("crash", 1.0, 0.9, "n1", tail=tail, rank=0, **fields)])


def lost() -> Diagnosis:
    return diagnose([Failure("node_lost", 1.0, 0.0, "n2", evidence=("silent",))])


ECC = "CUDA error: uncorrectable ECC error encountered"
KILLED: dict[str, Any] = {"code": None, "signal": 9}


@pytest.mark.parametrize(
    ("diagnosis", "vacant", "requeue", "requeues", "action", "replace", "code"),
    [
        (lost(), ("n2",), True, 0, "requeue", ("n2",), 0),
        (crash(**KILLED), (), True, 0, "requeue", (), 0),
        (crash(ECC, code=1), (), True, 2, "requeue", ("n1",), 0),
        (crash("ValueError: x", code=1), (), True, 0, "stop", (), 0),  # the program's own
        (crash(**KILLED), (), True, 3, "stop", (), 0),
        (lost(), ("n2",), False, 0, "stop", ("n2",), NOTHING_LEFT),
        (crash(**KILLED), (), False, 0, "stop", (), 0),
    ],
)
def test_one_world(
    diagnosis: Diagnosis,
    vacant: tuple[str, ...],
    requeue: bool,
    requeues: int,
    action: str,
    replace: tuple[str, ...],
    code: int,
) -> None:
    budget = Budget()
    budget.spend(diagnosis)
    have = Means(2, 2, requeue, 3, world="pmi2", requeues=requeues)
    chosen = plan(diagnosis, vacant, budget, have)
    assert (chosen.action, chosen.replace, chosen.code) == (action, replace, code)
    assert chosen.rung == "one-world" and "--mpi=pmi2: an MPI world cannot" in chosen.why
    assert chosen.cause == chosen.why
    without = plan(diagnosis, vacant, budget, Means(2, 2, requeue, 3, requeues=requeues))
    assert without.rung != "one-world" and without.action in ("restart", "swap_spare")


def test_the_line_of_a_requeue_without_a_world() -> None:
    budget = Budget()
    budget.spend(lost())
    chosen = plan(lost(), ("n2",), budget, Means(0, 0, True, 3))
    assert (chosen.action, chosen.cause) == ("requeue", "no node can replace n2")


OPEN_MPI = "[n1:00255] Local abort before MPI_INIT completed completed successfully"
MPICH = (
    "internal_Init(59)....: MPI_Init(argc=0x7ffe, argv=0x7fff) failed\nPMI_Get_appnum returned -1"
)


@pytest.mark.parametrize("said", [OPEN_MPI, MPICH])
def test_mpi_that_does_not_start_again_is_requeued(said: str) -> None:
    """Slurm's default, not the line, makes the world: what it says is no error of the program."""
    budget, failed = Budget(), crash(said, code=1)
    budget.spend(failed)
    budget.spend(failed)  # as both ranks said it, or the second restart
    chosen = plan(failed, (), budget, Means(2, 2, True, 3, again=True))
    assert (chosen.action, chosen.rung) == ("requeue", "one-world")
    assert chosen.cause.startswith("MPI cannot be started again in the step")
    assert plan(failed, (), budget, Means(2, 2, True, 3)).action == "stop"  # at the first start
    spent = plan(failed, (), budget, Means(2, 2, True, 3, again=True, requeues=3))
    assert spent.action == "stop" and "requeued 3 times" in spent.why
