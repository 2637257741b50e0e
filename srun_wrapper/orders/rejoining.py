"""Decide whether healthy ranks may keep their processes in the next epoch (pure).

These are the conditions that only the supervisor knows. The others are checked where a rank runs:
it must be in ``robust_slurm.resilient`` and answer in time. In doubt all ranks are restarted.
"""

from __future__ import annotations

from srun_wrapper.decide.failure import Symptom

FAULTS: frozenset[Symptom] = frozenset({"crash", "hang", "node_lost"})
"""The symptoms after which the processes of the other ranks are as good as new ones. After a loss
that is not finite, or a state that differs from the peers', any of them may hold the fault."""


def may_stay(symptom: Symptom, failures: int, *, other_code: bool, exchange: bool) -> bool:
    """True if the ranks that are well may stay in a recovery that keeps the job running.

    ``failures``: in a row without progress, this one included. ``other_code``: the next epoch runs
    another version of the code. ``exchange``: nodes exchange their ranks to see whether the fault
    follows.
    """
    return symptom in FAULTS and failures <= 1 and not other_code and not exchange


def may_go_on(*, from_memory: bool, step: int | None) -> bool:
    """True if all that a rank's process may have changed is put back from a snapshot.

    A training that begins anew, or from disk, needs new processes.
    """
    return from_memory and step is not None and step > 0
