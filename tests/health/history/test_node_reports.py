"""Accusations: what a user may leave is read; whatever else lies there is refused by name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import report_files
from report_files import JOB, NAME, UID, ReportFiles, needs_root, raw

from health.gate.inquiry import of_rejection
from health.history.node_reports import (
    MOST,
    SIZE_LIMIT,
    ReportingJob,
    ReportsFound,
    find,
)

state = report_files.state


def test_found(state: ReportFiles) -> None:
    state.write(NAME, raw())
    state.write("n2.e3.json", raw(node="n2"))
    state.write("n1.tmp", b"")
    found = state.find()
    assert [a.name for a in found.reports] == [NAME]
    assert found.rejections == ()
    assert state.find(known=(NAME,)) == ReportsFound((), ())


def test_nobody_was_reported(state: ReportFiles) -> None:
    assert state.find() == ReportsFound((), ())
    assert state.find(JOB._replace(of=8)) == ReportsFound((), ())
    assert find("/nonexistent", "n1", JOB, (), 10.0) == (ReportsFound((), ()), "")


def test_of_a_standby_node(state: ReportFiles) -> None:
    """The report lies in the directory of the main job and names the standby node's number."""
    state.write(NAME, raw(job=9))
    assert [a.job for a in state.find(ReportingJob(9, UID, UID, of=7)).reports] == [9]


WITHDRAWN = "n1.e3.withdrawn.json"


def test_a_withdrawal_takes_its_report_back(state: ReportFiles) -> None:
    state.write(NAME, raw())
    state.write("n1.e4.json", raw(incident="e4"))
    state.write(WITHDRAWN, raw(withdrawn="the same error\non n1, n2"))
    found = state.find()
    assert [one.name for one in found.reports] == ["n1.e4.json"]
    (one,) = found.withdrawals
    assert (one.name, one.of, one.job, one.uid) == (WITHDRAWN, NAME, 7, UID)
    assert one.why == "the same error on n1, n2" and found.rejections == ()
    assert state.find(known=(NAME, WITHDRAWN)).withdrawals == ()


def test_a_withdrawal_is_read_however_many_reports_there_were(state: ReportFiles) -> None:
    """A job had reported the node as often as is looked at: the wrong strike stayed."""
    known = tuple(f"n1.e{n}.json" for n in range(MOST))
    for name in known:
        state.write(name, raw())
    state.write("n1.e99.json", raw())
    state.write(WITHDRAWN, raw(withdrawn="an outage"))
    found = state.find(known=known)
    assert [one.of for one in found.withdrawals] == [NAME] and found.reports == ()
    found = state.find(known=(*known, *(f"n1.w{n}.withdrawn.json" for n in range(MOST))))
    assert found == ReportsFound((), ())


@pytest.mark.parametrize(
    ("change", "why"),
    [({}, "reason"), ({"withdrawn": 1}, "reason"), ({"withdrawn": "x", "job": 8}, "not of job 7")],
)
def test_a_withdrawal_that_is_none_takes_nothing_back(
    state: ReportFiles, change: dict[str, Any], why: str
) -> None:
    state.write(NAME, raw())
    state.write(WITHDRAWN, raw(**change))
    found = state.find()
    assert [one.name for one in found.reports] == [NAME] and found.withdrawals == ()
    assert why in found.rejections[0].why


@needs_root
def test_nobody_else_withdraws(state: ReportFiles) -> None:
    state.write(NAME, raw())
    state.write(WITHDRAWN, raw(withdrawn="x"), uid=666)
    found = state.find()
    assert [one.name for one in found.reports] == [NAME]
    assert [(one.name, one.uid) for one in found.rejections] == [(WITHDRAWN, 666)]


def rejected(found: ReportsFound) -> tuple[str, int, str]:
    assert found.reports == ()
    (one,) = found.rejections
    return one.name, one.uid, one.why


@needs_root
@pytest.mark.parametrize("uid", [666, 0])
def test_a_file_of_somebody_else(state: ReportFiles, uid: int) -> None:
    state.write(NAME, raw(), uid=uid)
    why = f"it belongs to uid {uid}, not to the job's {UID}"
    assert rejected(state.find()) == (NAME, uid, why)


@needs_root
def test_a_directory_of_somebody_else(state: ReportFiles) -> None:
    """Job numbers can be guessed and every user may make a directory in jobs/."""
    state.write(NAME, raw())
    state.own(state.dir.parent, uid=666)
    assert state.find() == ReportsFound((), ()), "it is ignored, whatever lies there"
    state.own(state.dir.parent)
    state.own(state.dir, uid=666)
    assert rejected(state.find())[:2] == ("accusations", 666)
    assert state.find(known=("accusations",)) == ReportsFound((), ())


@needs_root
@pytest.mark.parametrize("trap", ["directory", "link", "file"])
def test_the_jobs_own_directory_beside_that_of_somebody_else(state: ReportFiles, trap: str) -> None:
    state.write(NAME, raw())
    state.dir.parent.rename(state.path / "jobs" / f"7.{UID}.2")
    for number, name in enumerate(("7", f"7.{UID}.1")):
        taken = state.path / "jobs" / name
        if trap == "directory":
            taken.mkdir()
        elif trap == "link":
            taken.symlink_to(state.path)
        else:
            taken.write_text("")
        state.own(taken, uid=666 + number)
    found = state.find()
    assert [a.name for a in found.reports] == [NAME] and found.rejections == ()


@pytest.mark.parametrize("what", ["file", "accusations"])
def test_links_are_not_followed(state: ReportFiles, what: str) -> None:
    real = state.write(NAME, raw())
    if what == "file":
        moved = state.path / "moved.json"
        real.rename(moved)
        real.symlink_to(moved)
        link = real
    else:
        link = state.dir
        moved = state.path / "moved"
        link.rename(moved)
        link.symlink_to(moved)
    state.own(link)
    name, uid, why = rejected(state.find())
    assert uid == UID and why.endswith("a link")
    assert name == {"file": NAME, "accusations": "accusations"}[what]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_rejected_and_does_not_hold_it(
    state: ReportFiles, make: Callable[[Any], None]
) -> None:
    make(state.dir / NAME)
    state.own(state.dir / NAME)
    assert rejected(state.find())[2] == "it is not a regular file"


def test_a_file_too_large(state: ReportFiles) -> None:
    state.write(NAME, raw() + b" " * SIZE_LIMIT)
    assert "larger" in rejected(state.find())[2]


def test_junk_and_a_good_one(state: ReportFiles) -> None:
    state.write("n1.a.json", b"junk")
    state.write(NAME, raw())
    found = state.find()
    assert len(found.reports) == len(found.rejections) == 1


def test_a_hostile_name_is_refused_once_and_printable_where_it_is_shown(
    state: ReportFiles,
) -> None:
    state.write("n1.\x1b[31m\n.json", b"junk")
    (rejection,) = state.find().rejections
    assert state.find(known=(rejection.name,)).rejections == ()
    assert of_rejection(rejection, JOB)["name"] == "n1.?[31m .json"


def test_at_most_eight_of_a_job(state: ReportFiles) -> None:
    for number in range(20):
        state.write(f"n1.e{number:02}.json", raw(incident=f"e{number:02}"))
    found = state.find()
    assert len(found.reports) == 8
    assert state.find(known=tuple(a.name for a in found.reports)) == ReportsFound((), ())


@needs_root
def test_an_unreadable_file_is_rejected(state: ReportFiles) -> None:
    """The reader is the user: what only root may read is no accusation."""
    state.write(NAME, raw(), uid=666).chmod(0o600)
    assert rejected(state.find()) == (NAME, 666, "Permission denied")


@needs_root
def test_the_reader_is_nobody_else_than_the_user(state: ReportFiles) -> None:
    state.dir.chmod(0o700)
    state.write(NAME, raw()).chmod(0o600)
    assert len(state.find().reports) == 1


def test_a_dead_file_system_costs_the_deadline(
    state: ReportFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        threading.Event().wait()

    monkeypatch.setattr(os, "scandir", never)
    began = time.monotonic()
    found, error = find(str(state.path), "n1", JOB, (), 0.3)
    assert (found, error) == (ReportsFound((), ()), "no answer in 0.3 s")
    assert time.monotonic() - began < 5


@needs_root
def test_files_exchanged_while_it_reads(
    state: ReportFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the opening the user puts a link, or another's directory, there."""
    state.write(NAME, raw())
    secret = state.path / "secret"
    secret.write_bytes(raw())
    real = os.open

    def exchanged(change: Callable[[], None]) -> Callable[..., int]:
        def opens(path: Any, flags: int, *more: Any, **at: Any) -> int:
            if path == NAME:
                os.seteuid(0)
                change()
                os.seteuid(UID)
            return real(path, flags, *more, **at)

        return opens

    def link() -> None:
        (state.dir / NAME).unlink()
        (state.dir / NAME).symlink_to(secret)

    monkeypatch.setattr(os, "open", exchanged(link))
    assert rejected(state.find())[0] == NAME

    def other() -> None:
        (state.dir / NAME).unlink()
        state.write(NAME, raw(), uid=666)

    (state.dir / NAME).unlink()
    state.write(NAME, raw())
    monkeypatch.setattr(os, "open", exchanged(other))
    assert rejected(state.find())[1] == 666
