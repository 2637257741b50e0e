"""Readers in processes of their own: the same samples as here, whatever becomes of a process."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import read_plan
import reader_pools
from reader_pools import NAME, Begin, Wanted, children, feed_of, given, pids
from waiting import until

from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes import order
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.service.client import code_of
from robust_slurm.data.service.readers import pool as pool_module
from robust_slurm.data.service.readers import staff
from robust_slurm.data.service.readers.pool import ReaderPool

REPOSITORY = Path(read_plan.__file__).parents[3]
begin, wanted = reader_pools.begin, reader_pools.wanted


def test_lanes_give_what_they_give_here_though_readers_are_killed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(staff, "WITHIN", 0.0)
    monkeypatch.setattr(pool_module, "SAME", 1000)
    pool = begin()
    chance = random.Random(7)
    killed: list[int] = []

    def kill() -> None:
        if chance.random() < 0.03:
            for pid in pids(pool)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    for lane in pool._lanes:
        feed, own = feed_of(pool, lane), feed_of(pool, lane, here=True)
        found = given(feed, 120, each=kill)
        assert found == given(own, 120), lane
        assert given(feed, 30, found[77][1]) == found[78:108]
    until(lambda: "reader was killed by SIGKILL; another goes on" in read(capfd), "it is said")
    assert len(set(killed)) > 3


def read(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


def test_what_a_reader_counts_and_says_is_as_here(
    begin: Begin, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = begin({3: "bad", 90: "bad", 20: "object"}, bad="skip")
    for lane in [("web", 0), ("web", 1)]:
        feed, own = feed_of(pool, lane), feed_of(pool, lane, here=True)
        capfd.readouterr()
        expected = given(own, 150)
        said = read(capfd)
        assert given(feed, 150) == expected
        assert read(capfd) == said
        figures = feed.lane.tally.figures()
        assert figures[:3] == own.lane.tally.figures()[:3]
        assert figures.busy > 0
    assert pool._here, "a lane with what cannot be sent is read here"


@pytest.mark.parametrize(
    ("what", "why", "cause"),
    [
        ("die", r"/0.jsonl: record 11: 3 readers have died here", ""),
        ("bad", r"/0.jsonl: record 11: ValueError: no tokens in 11; bad=", ""),
        ("exit", r"/0.jsonl: record 11: SystemExit: 11 is the last", "in decode\n"),
    ],
)
def test_a_record_that_ends_it_is_named(begin: Begin, what: str, why: str, cause: str) -> None:
    pool = begin({11: what})
    lane = next(  # the lane that has part 0 in its first pass
        lane
        for lane in (("web", 0), ("web", 1))
        if 0
        in order.parts_of_lane(
            [part.size for part in pool._plan.sources["web"].parts()], 0, "web", 0, lane[1], 2
        )
    )
    with pytest.raises(DataError, match=why) as caught:
        given(feed_of(pool, lane), 200)
    assert cause in str(caught.value.__cause__)


def test_a_reader_that_hangs_is_killed_when_the_patience_is_over(begin: Begin) -> None:
    pool = begin({0: "hang", 40: "hang", 80: "hang", 120: "hang"}, patience=3.0)
    feed = feed_of(pool, ("web", 0))
    feed.seek(Position())
    before = pids(pool)
    with pytest.raises(SourceStalled, match=r"jsonl: record 0: nothing for \d+ s"):
        while True:
            feed.next()
    until(lambda: pids(pool) != before and len(pids(pool)) == 2, "another")
    feed.close()
    other = feed_of(pool, ("code", 0))
    with contextlib.suppress(SourceStalled):  # the record was tried again, in the reader of this
        given(other, 1)
    assert len(given(other, 50)) == 50


OWNER = """
import sys, time
import read_plan
from robust_slurm.data.service.readers import staff
from robust_slurm.data.service.readers.pool import ReaderPool
from robust_slurm.data.service.client import code_of
staff.readers_wanted = lambda *_: 2
pool = ReaderPool(read_plan.plan(), "read_plan:plan", code_of("read_plan:plan"), lambda: 0.0)
while not (pool.staff.count == 2 and all(pool.staff._channels)):
    time.sleep(0.02)
print(pool.staff._spawner._process.pid, flush=True)
time.sleep(600)
"""


def test_readers_end_with_the_data_process_and_not_by_signals_for_ranks(tmp_path: Path) -> None:
    read_plan.write(tmp_path / "web", 2, 10)
    path = [str(Path(read_plan.__file__).parent), str(REPOSITORY)]
    environ = {**os.environ, "READ_PLAN": str(tmp_path), "PYTHONPATH": os.pathsep.join(path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], env=environ, stdout=-1) as owner:
        try:
            assert owner.stdout is not None
            program = int(owner.stdout.readline())
            until(lambda: len(children(program)) == 2, "two readers")
            all_ = [program, *children(program)]
            name = lambda pid: Path(f"/proc/{pid}/comm").read_text().strip()  # noqa: E731
            until(lambda: [*map(name, all_)] == ["robust-readers", *["robust-reader"] * 2], "names")
            for pid in all_:
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                    os.kill(pid, number)
            assert len([*map(name, all_)]) == 3
        finally:
            owner.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in all_), "the end of all")


def test_readers_come_and_go_and_their_program_is_started_again(
    begin: Begin, wanted: Wanted, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = begin()
    feed, own = feed_of(pool, ("web", 1)), feed_of(pool, ("web", 1), here=True)
    expected = given(own, 400)
    feed.seek(Position())
    found = [feed.next() for _ in range(50)]
    wanted[0] = 1
    until(lambda: len(pids(pool)) == 1, "one reader")
    found += [feed.next() for _ in range(50)]
    wanted[0] = 0
    until(lambda: pool.staff._spawner is None, "no reader")
    found += [feed.next() for _ in range(50)]
    wanted[0] = 3
    until(lambda: pool.staff.count == 3 and len(pids(pool)) == 3, "three readers", 60)
    found += [feed.next() for _ in range(50)]
    assert pool.staff._spawner is not None
    os.kill(pool.staff._spawner._process.pid, signal.SIGKILL)
    found += [feed.next() for _ in range(50)]
    until(lambda: pool.staff._spawner is not None and len(pids(pool)) == 3, "three again", 60)
    found += [feed.next() for _ in range(150)]
    assert found == [(meta, after) for meta, after, _, _ in expected]
    feed.close()
    assert "the process that makes readers has ended" in read(capfd)


def test_after_many_deaths_or_with_other_files_there_are_none(
    begin: Begin, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = begin()
    killed: set[int] = set()
    for number in range(staff.DEATHS):
        # one whose socket has closed may not be a zombie yet
        until(lambda: bool({*pids(pool)} - killed), "a reader")
        pid = min({*pids(pool)} - killed)
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        seen = number + 1
        until(lambda seen=seen: len(pool.staff._deaths) == seen, "it is seen")
    until(lambda: pool.staff._spawner is None, "the end of all")
    assert "they have died 6 times within 600 s" in read(capfd)
    assert given(feed_of(pool, ("web", 0)), 50) == given(feed_of(pool, ("web", 0), True), 50)
    plan = read_plan.plan()
    plan.fingerprint()
    (tmp_path / "sources" / "web" / "9.jsonl").write_text("{}\n")
    other = ReaderPool(plan, NAME, code_of(NAME), lambda: 0.0)
    until(lambda: bool(other.staff.off), "it is seen", 60)
    other.staff.close()
    assert "they find other files than the data process" in read(capfd)
