"""Snapshots of code that are removed: old ones that no job can need, and no other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from waiting import until

from robust_slurm.settings import Config
from robust_slurm.slurm.errors import SlurmError
from srun_wrapper.code import prune, requests
from srun_wrapper.code.requests import Follower, Request
from srun_wrapper.code.snapshot import Asked, take
from srun_wrapper.code.versions import Book, Change, Version

DAY = prune.DAY


def aged(path: Path, days: float) -> Path:
    when = time.time() - days * DAY
    os.utime(path, (when, when))
    return path


class Site:
    """A state directory and a shared store; the own job is 9."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.jobs, self.shared = top / "state" / "jobs", top / "store"
        self.config = Config(state_dir=top / "state", code_store=str(self.shared))
        (top / "proj").mkdir()
        (top / "proj" / "train.py").write_text("1\n")
        self.records = self.jobs / "9"
        self.records.mkdir(parents=True)
        self.own = self.shared / "9"
        self.version = self.snapshot(self.own)
        self.book()
        self.alive: set[int] = {9}

    def snapshot(self, store: Path) -> Version:
        return take(Asked(str(self.top / "proj"), str(store), (), 1e9))[0]

    def store(self, place: Path, days: float) -> Path:
        """Make a job's store, as old as that."""
        place.parent.mkdir(parents=True, exist_ok=True)
        self.snapshot(place)
        return aged(place, days)

    def book(self, *more: Version) -> None:
        versions = [self.version, *more]
        book = Book(str(self.top / "proj"), str(self.own), versions=versions, cluster="east")
        (self.records / "code.json").write_bytes(msgspec.json.encode(book))

    def prune(self, **options: float) -> list[str]:
        return prune.prune(self.config, self.own, self.records, lambda: self.alive, **options)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_stores_of_jobs_that_ended_long_ago_go(site: Site) -> None:
    old = [site.store(site.shared / "3", 15), site.store(site.jobs / "4" / "code", 15)]
    book = site.jobs / "4" / "code.json"
    book.write_text("{}")
    young = [site.store(site.shared / "5", 13), site.store(site.jobs / "6" / "code", 13)]
    assert sorted(site.prune()) == sorted(map(str, old))
    assert not any(p.exists() for p in old) and all(p.is_dir() for p in young)
    assert book.exists() and (site.own / site.version.id / "train.py").exists()
    assert not list(site.top.rglob(".old-*"))
    assert site.prune() == []


@pytest.mark.parametrize("where", ["store", "state"])
def test_a_job_that_slurm_knows_keeps_its_code_however_long_it_waits(
    site: Site, where: str
) -> None:
    place = site.shared / "3" if where == "store" else site.jobs / "3" / "code"
    site.store(place, 400)
    site.alive = {3, 9}
    assert site.prune() == [] and place.is_dir()


def test_nothing_goes_while_slurm_does_not_answer(site: Site) -> None:
    place = site.store(site.shared / "3", 400)

    def down() -> set[int]:
        raise SlurmError("timeout", ("squeue",), "no answer")

    assert prune.prune(site.config, site.own, site.records, down) == []
    assert place.is_dir()


def make_elsewhere(site: Site) -> Path:
    """A job that waits in the queue of another cluster."""
    record = site.jobs / "3"
    record.mkdir()
    book = Book(str(site.top / "proj"), str(site.shared / "3"), cluster="west")
    (record / "code.json").write_bytes(msgspec.json.encode(book))
    return site.store(site.shared / "3", 400)


def make_link(site: Site) -> Path:
    (site.shared / "3").symlink_to(site.top / "proj")
    return site.shared / "3"


def make_other(site: Site) -> Path:
    return site.store(site.shared / f"3.{os.getuid() + 1}.1", 400)


def make_results(site: Site) -> Path:
    """The user's own directory of a job, in the directory that code_store names."""
    place = site.store(site.shared / "3", 400)
    (place / "model.pt").write_text("weights")
    return aged(place, 400) / "model.pt"


def make_empty(site: Site) -> Path:
    (site.shared / "3").mkdir()
    return aged(site.shared / "3", 400)


def make_linked_record(site: Site) -> Path:
    """Anybody can make a link in the state directory; this user has a directory ``code``."""
    code = site.store(site.top / "home" / "code", 400)
    (site.jobs / "3").symlink_to(site.top / "home")
    return code


def make_linked_removal(site: Site) -> Path:
    """Anybody can make a link in a store that all users share."""
    theirs = site.store(site.top / "home", 400)
    site.store(site.shared / "3", 400)
    (site.shared / ".old-3").symlink_to(theirs)
    return next(theirs.glob("*.json"))


STRANGE: dict[str, Callable[[Site], Path]] = {
    "another cluster's": make_elsewhere,
    "results": make_results,
    "an empty one": make_empty,
    "what a link for a record leads to": make_linked_record,
    "what a link for a removal leads to": make_linked_removal,
    "another name": lambda site: site.store(site.shared / "notes", 400),
    "a link": make_link,
    "a name of another user's": make_other,
    "the own job's": lambda site: aged(site.own, 400),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_other_store_of_this_user_stays(site: Site, what: str) -> None:
    place = STRANGE[what](site)
    site.alive = {9}
    assert site.prune() == [] and place.exists()


def test_nothing_goes_while_slurm_does_not_know_the_own_job(site: Site) -> None:
    place = site.store(site.shared / "3", 400)
    site.alive = set()  # an empty answer of a slurmctld that has lost its state, or another cluster
    assert site.prune() == [] and place.is_dir()


def test_a_node_whose_clock_is_wrong_removes_nothing_young(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = site.store(site.shared / "3", 10), time.time
    monkeypatch.setattr(time, "time", lambda: real() + 400 * DAY)
    assert site.prune() == [] and place.is_dir()


def test_another_users_directory_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    place = site.store(site.shared / "3", 400)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    assert site.prune() == [] and place.is_dir()


def test_a_store_that_is_renewed_at_that_moment_gets_its_name_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = site.store(site.shared / "3", 400)
    rename = Path.rename

    def renewed(self: Path, target: Path) -> Path:
        if self == place:
            os.utime(self)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renewed)
    assert site.prune() == []
    assert list(place.glob("*/train.py"))


def test_a_removal_that_was_cut_short_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    place = site.store(site.shared / "3", 400)
    assert site.prune(seconds=-1.0) == [] and place.is_dir()
    with monkeypatch.context() as patch:
        patch.setattr(prune, "_clear", lambda _place, _until: None)
        site.prune()
    left = site.shared / ".old-3"
    assert left.is_dir() and not place.exists()
    os.utime(left)
    prune._clear(left, -1.0)
    assert site.prune() == [str(left)] and not left.exists()


def test_in_the_own_store_go_old_snapshots_that_nobody_asked_for(site: Site) -> None:
    first = aged(site.own / site.version.id, 400)
    (site.top / "proj" / "train.py").write_text("2\n")
    second = site.snapshot(site.own)
    place = site.own / second.id
    assert site.prune() == []  # its request may be on its way
    aged(place, 15)
    assert site.snapshot(site.own).id == second.id  # which renews it
    assert site.prune() == []
    aged(place, 15)
    site.book(second)
    assert site.prune() == []
    site.book()
    assert site.prune() == [str(place)]
    assert not place.exists() and not (site.own / f"{second.id}.json").exists()
    assert first.is_dir() and (site.own / f"{first.name}.json").exists()


def test_a_version_that_a_request_names_stays_until_the_job_runs_again(site: Site) -> None:
    (site.top / "proj" / "train.py").write_text("2\n")
    asked = site.snapshot(site.own)
    path = site.records / "updates.jsonl"
    path.touch()
    change = Change("1", "now", asked.id, "me", "head", "", time.time())
    requests.send(path, Request("change", change, asked))
    place = aged(site.own / asked.id, 400)  # the job waits in its queue
    assert site.prune() == [] and place.is_dir()


def test_what_is_no_snapshot_stays_in_the_own_store(site: Site) -> None:
    place = site.own / "checkpoints"
    place.mkdir()
    aged(place, 400)
    assert site.prune() == [] and place.is_dir()


def test_a_running_robust_srun_renews_its_store(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LOOK", 0.01)
    aged(site.own, 400)
    follower = Follower(site.records / "updates.jsonl", 0, lambda _request, _at: None, site.own)
    until(lambda: site.own.stat().st_mtime > time.time() - DAY, "a new time", 5.0)
    follower.close()
