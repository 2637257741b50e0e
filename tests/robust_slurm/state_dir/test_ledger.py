"""The job's files: torn lines, several writers, file systems that do not answer."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from health.history.node_reports import ReportingJob, parse_withdrawal
from robust_slurm.state_dir import job_dirs, ledger
from robust_slurm.state_dir.ledger import (
    JobLedger,
    StateDirError,
    append_line,
    make_job_dir,
    prepare,
    replace_file,
)


def lines(path: Path) -> list[object]:
    """Return a reader's view: whole lines that are JSON."""
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def test_append(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, {"n": 1, "path": Path("/x"), "text": "ä\n\udcff"})
    append_line(path, {"n": 2})
    assert lines(path) == [{"n": 1, "path": "/x", "text": "ä\n\udcff"}, {"n": 2}]
    assert path.read_bytes().count(b"\n") == 2


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_torn_last_line_stays_alone(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "a.jsonl"
    append_line(path, {"n": 1})
    whole = path.stat().st_size
    append_line(path, {"n": 2, "text": "x" * 20})
    keep = data.draw(st.integers(whole, path.stat().st_size - 2))
    os.truncate(path, keep)
    append_line(path, {"n": 3})
    assert lines(path) == [{"n": 1}, {"n": 3}]


def _write_many(path: Path, writer: int, count: int) -> None:
    for number in range(count):
        append_line(path, {"writer": writer, "number": number, "pad": "x" * (number % 700)})


def test_concurrent_writers_never_mix(tmp_path: Path) -> None:
    path, count = tmp_path / "a.jsonl", 200
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, w, count)) for w in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    found = lines(path)
    # A writer may take another's line in flight for a torn one: an empty line, but none is lost.
    assert len(found) == len(path.read_bytes().split()) == 4 * count
    for w in range(4):
        own = [r["number"] for r in found if isinstance(r, dict) and r["writer"] == w]
        assert own == list(range(count))


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="space"):
        append_line(Path("/dev/full"), {"n": 1})


def test_a_short_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr("os.write", lambda fd, data: real(fd, data[:3]))
    with pytest.raises(OSError, match="in part"):
        append_line(tmp_path / "a.jsonl", {"n": 1})


def test_replace_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for n in range(3):
        replace_file(path, {"n": n})
    assert json.loads(path.read_text()) == {"n": 2}
    assert path.stat().st_mode & 0o777 == 0o644
    with pytest.raises(TypeError):
        replace_file(path, {(1, 2): "not a JSON key"})  # type: ignore[dict-item]
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert json.loads(path.read_text()) == {"n": 2}


def test_the_ledger_writes_all_kinds(tmp_path: Path) -> None:
    book = JobLedger(prepare(tmp_path, 7))
    book.incident({"id": "0-1"})
    book.event("epoch", epoch=2)
    book.roster("0", {"step": 3})
    book.report_node("n3", "0-1", {"symptom": "crash"})
    book.withdraw("n3", "0-1", 7, "the same error on n3, s1", "shared")
    book.close()
    where = tmp_path / "jobs" / "7"
    assert lines(where / "incidents.jsonl") == [{"v": 1, "id": "0-1"}]
    (event,) = lines(where / "events.jsonl")
    assert isinstance(event, dict) and event["event"] == "epoch" and event["epoch"] == 2
    assert json.loads((where / "roster.0.json").read_text()) == {"version": 1, "step": 3}
    accusation = json.loads((where / "accusations" / "n3.0-1.json").read_text())
    assert accusation["node"] == "n3" and accusation["symptom"] == "crash"
    taken_back = (where / "accusations" / "n3.0-1.withdrawn.json").read_bytes()
    found = parse_withdrawal(taken_back, "n3.0-1.withdrawn.json", "n3", ReportingJob(7, 1, 1, 7))
    assert (found.of, found.why) == ("n3.0-1.json", "the same error on n3, s1")
    assert (book.error, book.dropped) == ("", 0)


def test_failed_writes_are_counted_and_named(tmp_path: Path) -> None:
    book = JobLedger(tmp_path / "gone")
    book.incident({"id": "0-1"})
    until(lambda: book.dropped == 1, "the lost line", 2.5, 0.005)
    assert "incidents.jsonl: No such file" in book.error
    (tmp_path / "gone").mkdir()
    book.incident({"id": "0-2"})
    book.close()
    assert lines(tmp_path / "gone" / "incidents.jsonl") == [{"v": 1, "id": "0-2"}]
    assert book.dropped == 1 and "No such file" in book.error  # the reason of the lost one stays


def test_a_dead_file_system_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    monkeypatch.setattr(ledger, "append_line", lambda *_: release.wait(30.0) or None)
    monkeypatch.setattr(ledger, "MAX_WAITING", 8)
    book = JobLedger(tmp_path)
    began = time.monotonic()
    for n in range(100):
        book.event("x", n=n)
        book.roster("0", {})
    book.close(0.1)
    assert time.monotonic() - began < 5.0
    assert book.dropped == 200  # those that still wait are lost, too
    assert "no answer from the file system" in book.error
    release.set()


@pytest.mark.parametrize("kind", ["file", "missing", "accusations"])
def test_prepare_names_the_directory(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    where = {"file": tmp_path / "file", "missing": Path("/proc/nowhere")}.get(kind, tmp_path)
    if kind == "accusations":
        (tmp_path / "jobs" / "7").mkdir(parents=True)
        (tmp_path / "jobs" / "7" / "accusations").write_text("")
    with pytest.raises(StateDirError, match=f"cannot write {where}/jobs/7: "):
        prepare(where, 7)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="root tries as another user; others need no trick")
def test_prepare_without_permission() -> None:
    """A child without rights: exit code 3 when prepare says so."""

    def attempt(where: Path) -> None:
        os.setgid(65534)
        os.setuid(65534)
        try:
            prepare(where, 7)
        except StateDirError as err:
            os._exit(3 if "Permission denied" in str(err) else 4)
        os._exit(0)

    with tempfile.TemporaryDirectory() as base:  # pytest's own is closed to other users
        where = Path(base)
        where.chmod(0o555)
        child = multiprocessing.get_context("fork").Process(target=attempt, args=(where,))
        child.start()
        child.join(20)
    assert child.exitcode == 3


def test_prepare_is_repeatable_and_leaves_no_probe(tmp_path: Path) -> None:
    for _ in range(2):
        assert prepare(tmp_path, 7) == tmp_path / "jobs" / "7"
    assert [p.name for p in (tmp_path / "jobs" / "7").iterdir()] == ["accusations"]


def test_prepare_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def stuck(*_args: object, **_more: object) -> None:
        release.wait(30.0)

    monkeypatch.setattr(Path, "mkdir", stuck)
    with pytest.raises(StateDirError, match=r"no answer from the file system in 0\.1 s"):
        prepare(tmp_path, 7, deadline=0.1)
    release.set()


@pytest.mark.slow
def test_jobs_that_come_first_at_the_same_time(tmp_path: Path) -> None:
    """One makes what is everybody's: no other may ever find it closed."""
    fork = multiprocessing.get_context("fork")
    for number in range(10):
        state = tmp_path / str(number)
        jobs = state / "jobs"
        makers = [fork.Process(target=make_job_dir, args=(state, job)) for job in range(4)]
        for maker in makers:
            maker.start()
        seen: set[int] = set()
        while any(maker.is_alive() for maker in makers):
            with contextlib.suppress(FileNotFoundError):
                seen.add(stat.S_IMODE(jobs.stat().st_mode))
        assert [maker.exitcode for maker in makers] == [0] * 4
        assert seen <= {0o1777}
        assert sorted(p.name for p in jobs.parent.iterdir()) == ["jobs"]
        assert sorted(p.name for p in jobs.iterdir()) == ["0", "1", "2", "3"]


def test_who_may_not_make_it_waits_for_who_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = tmp_path / "jobs"

    def denied(path: Path) -> None:
        if len(calls) == 3:
            jobs.mkdir()
        calls.append(path)
        raise PermissionError(13, "Permission denied")

    calls: list[Path] = []
    monkeypatch.setattr(ledger, "_make_everybodys", denied)
    make_job_dir(tmp_path, 7)
    assert len(calls) == 4 and (jobs / "7" / "accusations").is_dir()
    monkeypatch.setattr(ledger, "OTHER_USER", 0.1)
    with pytest.raises(PermissionError):
        make_job_dir(tmp_path / "other", 7)


def test_a_stalled_file_system_leaves_the_umask_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask is the whole process's: files of other threads and ranks were open to everybody."""
    monkeypatch.setattr(os, "umask", lambda _mask: pytest.fail("the umask was changed"))
    make_job_dir(tmp_path, 7)
    assert stat.S_IMODE((tmp_path / "jobs").stat().st_mode) == 0o1777


# -- what others made there -------------------------------------------------------------------

OTHER = 20002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


def squat(jobs: Path, *squats: str) -> None:
    for name in squats:
        (jobs / name).mkdir(parents=True)
        os.chown(jobs / name, OTHER, OTHER)


@needs_root
def test_a_directory_that_another_user_made_is_passed_over(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    squat(jobs, "7")
    made = prepare(tmp_path, 7)
    assert made == jobs / "7.0.1" and not list((jobs / "7").iterdir())
    assert prepare(tmp_path, 7) == made, "a requeued job finds its own again"
    (jobs / "7").rmdir()
    assert prepare(tmp_path, 7) == made, "also when the other one is gone"
    assert job_dirs.find(str(jobs), 7, 0) == "7.0.1"
    assert job_dirs.find(str(jobs), 7, OTHER) is None


@needs_root
def test_with_all_names_taken_there_are_no_records(tmp_path: Path) -> None:
    squat(tmp_path / "jobs", *job_dirs.names(7, 0))
    with pytest.raises(
        StateDirError, match=r"its 7 alternatives belong to other users \(uid 20002"
    ):
        prepare(tmp_path, 7)
    book = JobLedger("")
    book.incident({"id": "0-1"})
    book.report_node("n1", "0-1", {})
    book.close()
    assert (book.dir, book.error, book.dropped) == (None, "", 0)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("7", (7, None)),
        ("7.20001.3", (7, 20001)),
        ("07", None),
        ("7.20001", None),
        ("7.20001.13", None),
        ("7.x.1", None),
        ("99999999999", None),
        ("\u0667", None),
        ("7\n", None),
        ("", None),
    ],
)
def test_names_of_directories(name: str, named: tuple[int, int | None] | None) -> None:
    assert job_dirs.parse(name) == named


@given(st.integers(1, (1 << 32) - 1), st.integers(0, (1 << 32) - 2))
def test_every_name_leads_back_to_its_job(job: int, uid: int) -> None:
    found = job_dirs.names(job, uid)
    assert len(set(found)) == job_dirs.PLACES
    assert [job_dirs.parse(name) for name in found] == [(job, None), *[(job, uid)] * 7]


def test_many_entries_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked up; the directory, which anybody can fill, is not listed."""
    made = prepare(tmp_path, 7)

    def never(*_: object) -> None:
        raise AssertionError("listed")

    for listing in ("scandir", "listdir"):
        monkeypatch.setattr(os, listing, never)
    assert job_dirs.find(str(tmp_path / "jobs"), 7, os.getuid()) == made.name
    assert prepare(tmp_path, 7) == made
