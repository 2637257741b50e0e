"""The book of a job's code: what waits, what is due, and when the way back is taken."""

from __future__ import annotations

import pytest

from srun_wrapper.code.versions import KEPT, LAZY_MOST, Book, Change, Kind, Version, name_of

NOW = 1_000_000.0
TRIAL = 600.0


def version(name: str) -> Version:
    return Version(name, f"digest of {name}", "", 1, 1, NOW)


def change(kind: Kind, name: str, at: float = NOW) -> Change:
    return Change(f"{kind}-{name}", kind, name, "user", "login", "", at)


def book(*progressed: str) -> Book:
    """A job that runs version a; b, c and d are known."""
    found = Book("/proj", "/store", versions=[version(name) for name in "abcd"])
    start = change("start", "a")
    found.changes.append(start)
    found.apply(start, NOW)
    found.progressed = list(progressed)
    return found


def states(found: Book) -> list[str]:
    return [each.state for each in found.changes]


def test_an_urgent_request_is_due_at_once() -> None:
    found = book("a")
    assert found.due(NOW) is None
    assert found.request(change("now", "b")) == ""
    due = found.due(NOW)
    assert due is not None and due.version == "b" and found.current == "a"
    found.apply(due, NOW + 1)
    assert found.current == "b" and found.due(NOW + 1) is None
    assert states(found) == ["replaced", "in force"]


@pytest.mark.parametrize(
    ("after", "due"), [(0.0, False), (LAZY_MOST - 1, False), (LAZY_MOST, True)]
)
def test_a_lazy_request_waits_for_a_day_at_most(after: float, due: bool) -> None:
    found = book("a")
    found.request(change("lazy", "b"))
    assert (found.due(NOW + after) is not None) is due
    assert found.waiting() is not None  # a recovery applies it any time


def test_a_newer_request_replaces_one_that_waits() -> None:
    found = book("a")
    found.request(change("lazy", "b"))
    assert found.request(change("now", "c")) == ""
    assert states(found) == ["in force", "replaced", "waiting"]
    assert found.cancel("user") is found.changes[-1]
    assert states(found) == ["in force", "replaced", "cancelled"]
    assert found.cancel("user") is None and found.due(NOW) is None


def test_many_requests_leave_the_version_in_force_in_the_book() -> None:
    found = book("a")
    for number in range(KEPT + 9):
        found.request(change("lazy", "bc"[number % 2]))
    assert found.current == "a"
    assert len(found.changes) == KEPT + 1
    for _ in range(KEPT + 9):
        found.request(change("now", "unknown"))
    assert found.waiting() is not None


def test_what_is_refused() -> None:
    found = book("a")
    assert "in force already" in found.request(change("now", "a"))
    assert "not known" in found.request(change("now", "e"))
    found.restarts = False
    assert "not restarted" in found.request(change("now", "b"))
    assert states(found) == ["in force", "refused", "refused", "refused"]


def updated(kind: Kind, *progressed: str) -> Book:
    """A job that runs b since NOW, after a."""
    found = book(*progressed)
    found.request(change(kind, "b"))
    waiting = found.waiting()
    assert waiting is not None
    found.apply(waiting, NOW)
    return found


@pytest.mark.parametrize(
    ("kind", "progressed", "after", "target"),
    [
        ("now", ("a",), 1.0, "a"),
        ("lazy", ("a",), 1.0, "a"),
        ("now", ("a", "b"), 1.0, "a"),  # it has made steps, and the trial is not over
        ("now", ("a", "b"), TRIAL + 1, ""),  # it is proven
        ("now", ("a",), TRIAL + 1, "a"),  # long ago, but it has never made progress
        ("now", (), 1.0, ""),  # nothing has ever worked
        ("rollback", ("a",), 1.0, ""),  # ordered by a person, to a version that worked
    ],
)
def test_the_way_back(kind: Kind, progressed: tuple[str, ...], after: float, target: str) -> None:
    assert updated(kind, *progressed).rollback_target(NOW + after, TRIAL) == target


def test_a_job_goes_back_by_itself_once_per_update() -> None:
    found = updated("now", "c", "a", "b")
    found.roll_back(change("automatic", "a"), "failed", NOW + 5)
    assert found.current == "a" and states(found) == ["replaced", "rolled back", "in force"]
    assert found.progressed == ["c", "a"]  # b is not gone back to
    assert found.rollback_target(NOW + 6, TRIAL) == ""
    found.request(change("now", "d", NOW + 7))
    waiting = found.waiting()
    assert waiting is not None
    found.apply(waiting, NOW + 8)
    assert found.rollback_target(NOW + 9, TRIAL) == "a"


def test_progress_is_noted_once() -> None:
    found = updated("now", "a")
    assert found.back() == "a"
    assert found.progress() and not found.progress()
    assert found.progressed == ["a", "b"] and found.back() == "a"


@pytest.mark.parametrize(
    ("commit", "taken", "name"),
    [
        ("0123456789abcdef", "", "0123456789ab"),
        ("0123456789abcdef", "feedc0de0000ff", "0123456789ab"),
        ("0123456789abcdef", "another", "c-feedc0de0000"),  # a file that git was told to hide
        ("", "", "c-feedc0de0000"),
    ],
)
def test_names(commit: str, taken: str, name: str) -> None:
    assert name_of(commit, "feedc0de0000ff", lambda _name: taken) == name
