"""Whose a process is and which ones the epilog ends, as functions of data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_leftovers import OTHER, UID, proc

from health.leftovers.processes import Process, claim_of, leftovers, others
from health.node.proctable import stepd_of


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (b"PATH=/bin\0SLURM_JOB_ID=12\0", 12),
        (b"XSLURM_JOB_ID=12\0", 0),
        (b"SLURM_JOB_ID=12x\0SLURM_JOB_ID=13\0", 13),
        (b"SLURM_JOB_ID=" + b"9" * 5000, 0),
        (b"", 0),
    ],
)
def test_claim_of(environ: bytes, job: int) -> None:
    assert claim_of(environ) == job


@pytest.mark.parametrize(
    ("name", "uid", "title", "job"),
    [
        ("slurmstepd", 0, "slurmstepd: [123.batch]\0", 123),
        ("slurmstepd", 0, "slurmstepd: [123.0]", 123),
        ("slurmstepd", 0, "slurmstepd: [123_4.extern]", 123),
        ("slurmstepd", 0, "slurmstepd: [123+1.interactive]", 123),
        ("slurmstepd", 0, "/usr/sbin/slurmstepd", -1),
        # The process that keeps Slurm's scope in cgroup/v2 serves no job, and is always there.
        ("slurmstepd", 0, "/usr/sbin/slurmstepd\0infinity\0", 0),
        ("slurmstepd", 0, "slurmstepd infinity", 0),
        ("slurmstepd", 0, "/usr/sbin/slurmstepd\0infinity\x0055\0", -1),
        ("slurmstepd", UID, "slurmstepd: [123.batch]", 0),  # anybody can call himself so
        ("python", 0, "slurmstepd: [123.batch]", 0),
    ],
)
def test_stepd_of(name: str, uid: int, title: str, job: int) -> None:
    assert stepd_of(name, uid, title) == job


STEPD = Process(50, 1, 0, 500, "S", "slurmstepd", stepd=9)


@pytest.mark.parametrize(
    ("found", "steps", "another"),
    [
        ([], [], False),
        ([proc(1)], [], False),
        ([], [7], False),  # its own
        ([], [9], True),  # whose it is cannot be told
        ([STEPD], [], True),
        ([STEPD, proc(2, UID)._replace(parent=50)], [], True),
        ([STEPD, proc(2, OTHER)._replace(parent=50)], [9], False),
        ([STEPD, proc(2, OTHER, job=9)], [], False),
        ([STEPD, proc(2, OTHER, job=9), proc(3, UID, job=9)], [], True),
        # A leftover that names another user's job in its environment is no witness.
        ([STEPD, proc(2, OTHER, job=9), proc(3, UID, claims=9)], [], False),
        ([STEPD._replace(stepd=-1)], [], True),
        # A process whose job is not known is no witness for a daemon that does not say its own.
        ([STEPD._replace(stepd=-1), proc(2, OTHER, job=-1)], [], True),
        ([STEPD._replace(stepd=7)], [], False),
    ],
)
def test_others(found: list[Process], steps: list[int], another: bool) -> None:
    assert others(found, steps, 7, UID) == another


LISTED = [
    proc(1),
    proc(2, job=7),
    proc(3, claims=7),
    proc(4, job=8, claims=7),  # the kernel says: another job's
    proc(5, OTHER, job=7),
    proc(6)._replace(state="Z"),
    proc(7)._replace(state="D"),
    proc(8, job=-1, claims=7),  # of a job that is over, whichever
    STEPD,
]


@pytest.mark.parametrize(
    ("uid", "mode", "alone", "named", "pids"),
    [
        (UID, "user", True, False, [1, 2, 3, 4, 7, 8]),
        (UID, "user", True, True, [1, 2, 3, 4, 7, 8]),
        (UID, "user", False, False, [2, 3]),
        (UID, "job", True, False, [2, 3, 8]),
        (UID, "job", True, True, [2, 3]),  # 8 is another job's, whose SLUID is not this one's
        (UID, "job", False, False, [2, 3]),
        (UID, "never", True, False, []),
        (0, "user", True, False, []),
        (-1, "user", True, False, []),
        (OTHER, "job", True, False, [5]),
    ],
)
def test_leftovers(uid: int, mode: str, alone: bool, named: bool, pids: list[int]) -> None:
    assert [p.pid for p in leftovers(LISTED, 7, uid, mode, alone, named=named)] == pids


@pytest.mark.parametrize("mode", ["user", "job"])
@pytest.mark.parametrize("named", [True, False])
def test_a_system_user_never_loses_all_its_processes(mode: str, named: bool) -> None:
    listed = [proc(1, 999), proc(2, 999, job=7), proc(3, 999, job=-1)]
    assert [p.pid for p in leftovers(listed, 7, 999, mode, True, named=named)] == [2]


@given(st.lists(st.builds(Process, *[st.integers(0, 9)] * 4, st.sampled_from("SRDZ"), st.text())))
def test_only_ever_processes_of_that_user(listed: list[Process]) -> None:
    for mode in ("user", "job"):
        assert all(p.uid == 5 for p in leftovers(listed, 3, 5, mode, True))
