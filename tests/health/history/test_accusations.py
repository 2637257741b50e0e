"""Accusations: what a user may leave is read; whatever else lies there is refused by name."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.history.accusations import (
    SIZE_LIMIT,
    Accused,
    Found,
    companion_of,
    find,
    parse,
)
from health.history.inquiry import of_rejection

UID = 20001 if os.geteuid() == 0 else os.geteuid()
JOB = Accused(job=7, uid=UID, gid=UID, of=7)
NAME = "n1.e3.json"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")

RECORD: dict[str, Any] = {
    "v": 1,
    "node": "n1",
    "incident": "e3",
    "job": 7,
    "user": "trainer",
    "time": 1795253932.5,
    "symptom": "node_lost",
    "evidence": ["no report for 6.0 s", "connection closed"],
}


def raw(**changes: Any) -> bytes:
    return json.dumps(RECORD | changes).encode()


# -- one record -------------------------------------------------------------------------------


def test_what_robust_srun_writes_is_accepted() -> None:
    found = parse(raw(), NAME, "n1", JOB)
    assert found.symptom == "node_lost" and found.job == 7 and found.uid == UID
    assert found.evidence == ("no report for 6.0 s", "connection closed")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 60000, "no JSON"),
        (b"[]", "no JSON object"),
        (raw(v=2), "version"),
        (raw(v=True), "version"),
        (raw(v="1"), "version"),
        (raw(node="n2"), "another node"),
        (raw(node=["n1"]), "another node"),
        (raw(incident="e4"), "incident"),
        (raw(incident=None), "incident"),
        (raw(job=8), "not of job 7"),
        (raw(job="7"), "not of job 7"),
        (raw(job=7.0), "not of job 7"),
        (raw(time="now"), "time"),
        (raw(time=float("nan")), "time"),
        (raw(time=-1), "time"),
        (raw(time=10**400), "time"),
        (raw(time=True), "time"),
        (raw(symptom="node_lost; rm -rf"), "symptom"),
        (raw(symptom=""), "symptom"),
        (raw(symptom={"a": 1}), "symptom"),
        (raw(evidence="none"), "evidence"),
        (raw(evidence=[1]), "evidence"),
        (b'{"v":1,"job":' + b"7" * 5000 + b"}", "no JSON"),
    ],
)
def test_what_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(content, NAME, "n1", JOB)


def test_evidence_is_cut_and_made_printable() -> None:
    lines = ["a\x1b[2Jb\n\x00c", "x" * 5000] + ["more"] * 100
    found = parse(raw(evidence=lines), NAME, "n1", JOB)
    assert found.evidence[0] == "a?[2Jb ?c"
    assert len(found.evidence[1]) == 300 and len(found.evidence) == 20


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.one_of(st.binary(max_size=60), _json.map(lambda v: json.dumps(v).encode())))
def test_any_bytes_are_refused_not_raised_over(content: bytes) -> None:
    with pytest.raises(ValueError):
        parse(content, NAME, "n1", JOB)


@given(st.dictionaries(st.sampled_from(sorted(RECORD)), _json, max_size=3))
def test_any_field_is_taken_or_refused(changes: dict[str, Any]) -> None:
    try:
        found = parse(raw(**changes), NAME, "n1", JOB)
    except ValueError as error:
        assert str(error)
    else:
        assert (found.job, found.uid) == (7, UID)
        assert all(line.isprintable() and len(line) <= 300 for line in found.evidence)


@pytest.mark.parametrize(
    ("comment", "job"),
    [
        ("robust: standby of job 12", 12),
        ("robust: standby of job 12 and more", 0),
        ("standby of job 12", 0),
        ("robust: standby of job 99999999999", 0),
        ("", 0),
    ],
)
def test_companions_name_their_job(comment: str, job: int) -> None:
    assert companion_of(comment) == job


# -- the directories --------------------------------------------------------------------------


class State:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.dir = path / "jobs" / "7" / "accusations"
        self.dir.mkdir(parents=True)
        for made in (path, path.parent):
            made.chmod(0o755)
        (path / "jobs").chmod(0o1777)
        self.own(self.dir.parent, self.dir)

    def own(self, *paths: Path, uid: int = UID) -> None:
        for path in paths:
            os.chown(path, uid, uid, follow_symlinks=False)

    def write(self, name: str, content: bytes, uid: int = UID) -> Path:
        path = self.dir / name
        path.write_bytes(content)
        path.chmod(0o644)
        self.own(path, uid=uid)
        return path

    def find(self, accused: Accused = JOB, known: tuple[str, ...] = ()) -> Found:
        found, error = find(str(self.path), "n1", accused, known, 10.0)
        assert error == ""
        return found


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    open_to_all = [
        p for p in tmp_path.parents if p.stat().st_uid == os.geteuid() and p != Path("/")
    ]
    for above in open_to_all:  # pytest keeps its directories to root
        if "pytest" in above.name:
            above.chmod(0o755)
    yield State(tmp_path / "state")


def test_found(state: State) -> None:
    state.write(NAME, raw())
    state.write("n2.e3.json", raw(node="n2"))
    state.write("n1.tmp", b"")
    found = state.find()
    assert [a.name for a in found.accusations] == [NAME]
    assert found.rejections == ()
    assert state.find(known=(NAME,)) == Found((), ())


def test_nobody_was_accused(state: State) -> None:
    assert state.find() == Found((), ())
    assert state.find(JOB._replace(of=8)) == Found((), ())
    assert find("/nonexistent", "n1", JOB, (), 10.0) == (Found((), ()), "")


def test_of_a_companion(state: State) -> None:
    """It lies in the directory of the main job and names the companion's number."""
    state.write(NAME, raw(job=9))
    assert [a.job for a in state.find(Accused(9, UID, UID, of=7)).accusations] == [9]


WITHDRAWN = "n1.e3.withdrawn.json"


def test_a_withdrawal_takes_its_accusation_back(state: State) -> None:
    state.write(NAME, raw())
    state.write("n1.e4.json", raw(incident="e4"))
    state.write(WITHDRAWN, raw(withdrawn="the same error\non n1, n2"))
    found = state.find()
    assert [one.name for one in found.accusations] == ["n1.e4.json"]
    (one,) = found.withdrawals
    assert (one.name, one.of, one.job, one.uid) == (WITHDRAWN, NAME, 7, UID)
    assert one.why == "the same error on n1, n2" and found.rejections == ()
    assert state.find(known=(NAME, WITHDRAWN)).withdrawals == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [({}, "reason"), ({"withdrawn": 1}, "reason"), ({"withdrawn": "x", "job": 8}, "not of job 7")],
)
def test_a_withdrawal_that_is_none_takes_nothing_back(
    state: State, change: dict[str, Any], why: str
) -> None:
    state.write(NAME, raw())
    state.write(WITHDRAWN, raw(**change))
    found = state.find()
    assert [one.name for one in found.accusations] == [NAME] and found.withdrawals == ()
    assert why in found.rejections[0].why


@needs_root
def test_nobody_else_withdraws(state: State) -> None:
    state.write(NAME, raw())
    state.write(WITHDRAWN, raw(withdrawn="x"), uid=666)
    found = state.find()
    assert [one.name for one in found.accusations] == [NAME]
    assert [(one.name, one.uid) for one in found.rejections] == [(WITHDRAWN, 666)]


def rejected(found: Found) -> tuple[str, int, str]:
    assert found.accusations == ()
    (one,) = found.rejections
    return one.name, one.uid, one.why


@needs_root
def test_a_file_of_somebody_else(state: State) -> None:
    state.write(NAME, raw(), uid=666)
    assert rejected(state.find()) == (NAME, 666, f"it belongs to uid 666, not to the job's {UID}")


@needs_root
def test_a_directory_of_somebody_else(state: State) -> None:
    """Job numbers can be guessed and every user may make a directory in jobs/."""
    state.write(NAME, raw())
    state.own(state.dir.parent, uid=666)
    assert state.find() == Found((), ()), "it is ignored, whatever lies there"
    state.own(state.dir.parent)
    state.own(state.dir, uid=666)
    assert rejected(state.find())[:2] == ("accusations", 666)
    assert state.find(known=("accusations",)) == Found((), ())


@needs_root
@pytest.mark.parametrize("trap", ["directory", "link", "file"])
def test_the_jobs_own_directory_beside_that_of_somebody_else(state: State, trap: str) -> None:
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
    assert [a.name for a in found.accusations] == [NAME] and found.rejections == ()


@needs_root
def test_roots_own_file_is_no_accusation(state: State) -> None:
    state.write(NAME, raw(), uid=0)
    assert rejected(state.find())[1] == 0


def test_another_job_s_file(state: State) -> None:
    state.write(NAME, raw(job=8))
    assert rejected(state.find())[2] == "it is not of job 7"


@pytest.mark.parametrize("what", ["file", "accusations"])
def test_links_are_not_followed(state: State, what: str) -> None:
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


def test_a_fifo_does_not_hold_it(state: State) -> None:
    os.mkfifo(state.dir / NAME)
    state.own(state.dir / NAME)
    assert rejected(state.find())[2] == "it is no regular file"


def test_a_directory_is_no_file(state: State) -> None:
    (state.dir / NAME).mkdir()
    state.own(state.dir / NAME)
    assert rejected(state.find())[2] == "it is no regular file"


def test_a_file_too_large(state: State) -> None:
    state.write(NAME, raw() + b" " * SIZE_LIMIT)
    assert "larger" in rejected(state.find())[2]


def test_junk_and_a_good_one(state: State) -> None:
    state.write("n1.a.json", b"junk")
    state.write(NAME, raw())
    found = state.find()
    assert len(found.accusations) == len(found.rejections) == 1


def test_a_hostile_name_is_refused_once_and_printable_where_it_is_shown(state: State) -> None:
    state.write("n1.\x1b[31m\n.json", b"junk")
    (rejection,) = state.find().rejections
    assert state.find(known=(rejection.name,)).rejections == ()
    assert of_rejection(rejection, JOB)["name"] == "n1.?[31m .json"


def test_at_most_eight_of_a_job(state: State) -> None:
    for number in range(20):
        state.write(f"n1.e{number:02}.json", raw(incident=f"e{number:02}"))
    found = state.find()
    assert len(found.accusations) == 8
    assert state.find(known=tuple(a.name for a in found.accusations)) == Found((), ())


@needs_root
def test_an_unreadable_file_is_rejected(state: State) -> None:
    """The reader is the user: what only root may read is no accusation."""
    state.write(NAME, raw(), uid=666).chmod(0o600)
    assert rejected(state.find()) == (NAME, 666, "Permission denied")


@needs_root
def test_the_reader_is_nobody_else_than_the_user(state: State) -> None:
    state.dir.chmod(0o700)
    state.write(NAME, raw()).chmod(0o600)
    assert len(state.find().accusations) == 1


def test_a_dead_file_system_costs_the_deadline(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        threading.Event().wait()

    monkeypatch.setattr(os, "scandir", never)
    began = time.monotonic()
    found, error = find(str(state.path), "n1", JOB, (), 0.3)
    assert (found, error) == (Found((), ()), "no answer in 0.3 s")
    assert time.monotonic() - began < 5


@needs_root
def test_files_exchanged_while_it_reads(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
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
