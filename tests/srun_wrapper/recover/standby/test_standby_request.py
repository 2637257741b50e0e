"""The fate of a request for a standby node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from robust_slurm.slurm import Allotted
from srun_wrapper.recover.standby.request import NO_ANSWER, Outcome, StandbyRequest, outcome


def job(state: str = "FAILED", reason: str = "NonZeroExitCode", *nodes: str) -> Allotted:
    return Allotted(5, 100, state, reason, nodes)


@pytest.mark.parametrize(
    ("found", "code", "lasted", "away", "expected"),
    [
        # As Slurm 22.05 has them: a task that ended, or could not be run at all.
        (job("FAILED", "NonZeroExitCode", "s1"), 1, 0.3, False, "unfit"),
        (job("COMPLETING", "NonZeroExitCode", "s1"), 1, 0.3, False, "unfit"),
        (job("NODE_FAIL", "None", "s1"), 1, 9.0, False, "unfit"),
        # The answer to srun was lost: slurmctld gave the node to nobody.
        (job("FAILED", "JobLaunchFailure", "s1"), 1, 5.1, False, "again"),
        # It gives the same reason to a task that was killed within seconds, but not always.
        (job("FAILED", "JobLaunchFailure", "s1"), 137, 1.2, False, "unfit"),
        (job("COMPLETING", "JobLaunchFailure", "s1"), 137, 1.2, False, "unfit"),
        (job("FAILED", "JobLaunchFailure", "s1"), -15, 5.1, False, "again"),
        # Its prolog failed, or an administrator has cancelled it.
        (job("CANCELLED", "None", "s1"), 1, 1.0, False, "again"),
        (job("CANCELLED", "None"), 1, 9.0, False, "refused"),
        # Slurm was away while srun ran: nothing is known about the node.
        (job("FAILED", "NonZeroExitCode", "s1"), 1, 5.1, True, "again"),
        (None, 1, 10.0, True, "again"),
        # No allocation: refused at once, or slurmctld was away and is just back.
        (None, 1, 0.2, False, "refused"),
        (None, 1, NO_ANSWER, False, "again"),
    ],
)
def test_outcome(
    found: Allotted | None, code: int, lasted: float, away: bool, expected: Outcome
) -> None:
    assert outcome(found, code, lasted, away) == expected


def test_silent_only_once_slurm_runs_it_on_a_node() -> None:
    request = StandbyRequest(1, 2, [], [])
    request.process = cast("asyncio.subprocess.Process", SimpleNamespace(pid=100))  # type: ignore[name-defined]  # noqa: F821
    others = Allotted(4, 99, "RUNNING", "None", ("s9",))
    assert request.update([others], 10.0) is None and not request.node
    request.update([others, job("PENDING", "Resources")], 10.0)
    request.update([others, job("CONFIGURING", "None", "s1")], 20.0)  # its prolog runs
    assert (request.job, request.node) == (5, "s1") and not request.silent(90.0, 5.0)
    request.update([job("RUNNING", "None", "s1")], 30.0)
    request.update([job("RUNNING", "None", "s1")], 31.0)
    assert not request.silent(34.9, limit=5.0) and request.silent(35.0, limit=5.0)
