"""Decide whether healthy ranks may keep their processes in the next epoch (pure).

These are the conditions that only the supervisor knows. The others are checked where a rank runs:
it must be in ``robust_slurm.resilient`` and answer in time. In doubt all ranks are restarted.
"""

from __future__ import annotations

from typing import NamedTuple

from srun_wrapper.decide.failure import Symptom

FAULTS: frozenset[Symptom] = frozenset({"crash", "hang", "node_lost"})
"""The symptoms after which the processes of the other ranks are as good as new ones. After a loss
that is not finite, or a state that differs from the peers', any of them may hold the fault."""


class RejoinCase(NamedTuple):
    """A recovery whose plan keeps the job running."""

    symptom: Symptom
    failures: int  # in a row without progress, this one included
    other_code: bool  # the next epoch runs another version of the code
    exchange: bool  # nodes exchange their ranks to see whether the fault follows


def why_not(case: RejoinCase) -> str:
    """Return why all ranks must be restarted; "" if those that are well may stay."""
    if case.symptom not in FAULTS:
        return f"after {case.symptom} no process is trusted"
    if case.failures > 1:
        return "no step was made since the last failure"
    if case.other_code:
        return "the next epoch runs other code"
    if case.exchange:
        return "nodes exchange their ranks"
    return ""


def may_go_on(*, from_memory: bool, step: int | None) -> bool:
    """True if all that a rank's process may have changed is put back from a snapshot.

    A training that begins anew, or from disk, needs new processes.
    """
    return from_memory and step is not None and step > 0
