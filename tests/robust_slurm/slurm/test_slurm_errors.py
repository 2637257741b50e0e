"""Slurm's own messages, release by release, and what kind of failure each is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.slurm.errors import KINDS, SlurmError, classify

SHOW = ("scontrol", "show", "job", "1")
UPDATE = ("scontrol", "update", "JobId=1", "NodeList=n1")
SBATCH = ("sbatch", "--parsable")


@pytest.mark.parametrize(
    ("argv", "code", "stdout", "stderr", "kind"),
    [
        # recorded on 22.05.8
        (SHOW, 1, "", "slurm_load_jobs error: Invalid job id specified\n", "not_found"),
        (("scontrol", "show", "node", "nope"), 1, "Node nope not found\n", "", "not_found"),
        (UPDATE, 1, "", "slurm_update error: Invalid node name specified\n", "not_found"),
        (
            UPDATE,
            1,
            "",
            "scontrol: error: Could not load state information for job 999: "
            "Invalid job id specified\n",
            "not_found",
        ),
        (UPDATE, 1, "", "Job is no longer pending execution for job 1\n", "conflict"),
        # recorded on 24.11.5 and 26.05.5 (a change of a pending job's partition)
        (UPDATE, 1, "", "Resource temporarily unavailable for job 1\n", "conflict"),
        (UPDATE, 1, "", "Interrupted system call for job 1\n", "conflict"),
        (UPDATE, 1, "", "Invalid user id for job 1\n", "denied"),
        (UPDATE, 1, "", "slurm_update error: Invalid user id\n", "denied"),
        (
            UPDATE,
            1,
            "",
            "Job update not available right now, the DB index is being set, try again in a bit "
            "for job 14\n",
            "conflict",
        ),
        (
            ("scontrol", "requeue", "1"),
            1,
            "",
            "Access/permission denied for job 1\n",
            "denied",
        ),
        (("scontrol", "requeue", "1"), 1, "", "Job is pending execution for job 1\n", "conflict"),
        (
            ("scontrol", "requeue", "1"),
            1,
            "",
            "Requested operation is presently disabled for job 1\n",
            "denied",
        ),
        (
            ("scancel", "1"),
            210,
            "",
            "scancel: error: Kill job error on job id 1: Access/permission denied\n",
            "denied",
        ),
        (("scancel", "abc"), 1, "", "scancel: error: Invalid job id abc\n", "not_found"),
        (
            SBATCH,
            1,
            "",
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            "not_found",
        ),
        (
            SBATCH,
            1,
            "",
            "sbatch: error: Batch job submission failed: User's group not permitted to use this "
            "partition\n",
            "denied",
        ),
        (SBATCH, 255, "", "sbatch: unrecognized option '--bogus'\n", "invalid"),
        (SBATCH, 1, "", "sbatch: error: Batch script is empty!\n", "invalid"),
        (
            ("scontrol", "update", "nodename=n1", "state=drain"),
            1,
            "",
            "You must specify a reason when DOWNING or DRAINING a node. Request denied\n",
            "invalid",
        ),
        (
            ("scontrol", "update", "nodename=n1", "state=resume"),
            1,
            "",
            "slurm_update error: Invalid node state specified\n",
            "conflict",
        ),
        (
            SHOW,
            1,
            "",
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
            "unreachable",
        ),
        (
            ("scancel", "1"),
            8,
            "",
            "scancel: error: Kill job error on job id 1: Unable to contact slurm controller "
            "(connect failure)\n",
            "unreachable",
        ),
        (
            ("scontrol", "ping"),
            1,
            "",
            "scontrol: error: ClusterName needs to be specified\n"
            "scontrol: fatal: Unable to process configuration file\n",
            "invalid",
        ),
        # a client newer than its server, and other texts of slurm_errno.c (22.05 to 26.05)
        (SHOW, 1, "", "slurm_load_jobs error: Insane message length\n", "version"),
        (SHOW, 1, "", "slurm_load_jobs error: Zero Bytes were transmitted or received", "version"),
        (SHOW, 1, "", "slurm_load_jobs error: Unexpected message received", "version"),
        (SHOW, 1, "", "slurm_load_jobs error: Protocol authentication error", "version"),
        (SHOW, 1, "", "error: Incompatible versions of client and server code", "version"),
        (SHOW, 1, "", "slurm_load_jobs error: Socket timed out on send/recv operation", "timeout"),
        (SHOW, 1, "", "error: Rate limit exceeded, please retry momentarily", "timeout"),
        (UPDATE, 1, "", "Job/step already completing or completed for job 1", "conflict"),
        (SBATCH, 1, "", "error: Requested node configuration is not available", "invalid"),
        (
            SBATCH,
            1,
            "",
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
            "submit limit, user's size and/or time limits)",
            "denied",
        ),
        (SBATCH, 1, "", "something quite new\n", "other"),
        (SBATCH, 3, "", "", "other"),
        # exit code 0 that is none
        (UPDATE, 0, "", "slurm_update error: Access/permission denied\n", "denied"),
        (
            ("squeue",),
            0,
            "{}",
            "Unable to contact slurm controller (connect failure)",
            "unreachable",
        ),
        # and exit code 0 that is one, with something said on the side
        (UPDATE, 0, "", "", None),
        (UPDATE, 0, "", "warning: invalid something ignored", None),
        (SBATCH, 0, "123\n", "sbatch: error: lua: partition not permitted to use, moved", None),
    ],
)
def test_classify(
    argv: tuple[str, ...], code: int, stdout: str, stderr: str, kind: str | None
) -> None:
    error = classify(argv, code, stdout, stderr)
    assert (error.kind if error else None) == kind


@settings(deadline=None)
@given(st.integers(1, 255), st.text(max_size=2000), st.text(max_size=2000))
def test_a_failure_is_never_lost_and_can_be_shown(code: int, stdout: str, stderr: str) -> None:
    error = classify(UPDATE, code, stdout, stderr)
    assert error is not None
    assert error.kind in KINDS
    assert len(error.message) <= 500
    assert str(error).isprintable()


def test_text_says_what_happened_and_what_to_do() -> None:
    error = classify(UPDATE, 1, "", "Invalid user id for job 1\n")
    assert str(error) == (
        "`scontrol update JobId=1 NodeList=n1` failed (denied): Invalid user id for job 1; "
        "run it as the job's owner, or as a Slurm operator for nodes"
    )
    assert SlurmError("timeout", UPDATE, "x").transient
    assert not SlurmError("denied", UPDATE, "x").transient
