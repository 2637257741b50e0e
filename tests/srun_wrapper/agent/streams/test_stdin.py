"""The input of a rank that is restarted: everything again, or a word that it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_job import Job
from waiting import until

from srun_wrapper.agent.streams.stdin import Stdin
from srun_wrapper.command.input_rules import StdinFeed, feed, limited
from srun_wrapper.decide.ladder import Means
from srun_wrapper.protocol.messages import StdinRead

LINES = b"".join(b"%d\n" % number for number in range(100))
SOME = [sys.executable, "-c", "import os,sys; print(len(os.read(0, int(sys.argv[1]))))"]
ALL = [sys.executable, "-c", "import sys; sys.stdout.write(sys.stdin.read())"]


class Slot:
    """The descriptor that its ranks inherit, and what is told of it."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.fd, self.srun = os.pipe()
        self.told: list[bool] = []
        self.stdin = Stdin(self.told.append, self.fd, limit)

    def rank(self, argv: list[str], *more: str) -> bytes:
        done = subprocess.run([*argv, *more], stdin=self.fd, capture_output=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ends(self) -> None:
        os.close(self.srun)


def test_a_rank_finds_all_of_it_again() -> None:
    slot = Slot()
    assert not slot.stdin.used()
    os.write(slot.srun, LINES)
    assert int(slot.rank(SOME, "50")) == 50
    assert slot.stdin.used()  # so that a rank that rejoined would lack it
    slot.stdin.rewind()
    os.write(slot.srun, b"more\n")
    slot.ends()
    assert slot.rank(ALL) == LINES + b"more\n"
    slot.stdin.rewind()  # and again, though the end was seen
    assert slot.rank(ALL) == LINES + b"more\n"
    assert slot.told == [True]


def test_more_than_a_pipe_holds() -> None:
    slot = Slot()
    data = bytes(range(256)) * 2000
    with open(slot.srun, "wb") as srun:
        srun.write(data)  # while no rank reads
    assert int(slot.rank(SOME, "10")) == 10
    slot.stdin.rewind()
    counted = [sys.executable, "-c", "import sys; print(len(sys.stdin.buffer.read()))"]
    assert int(slot.rank(counted)) == len(data)


def test_what_is_not_kept_is_told() -> None:
    slot = Slot(limit=300_000)
    writer = subprocess.Popen(
        [sys.executable, "-c", "import os; [os.write(1, b'x' * 1000) for _ in range(1000)]"],
        stdout=slot.srun,
    )
    slot.ends()
    until(lambda: slot.told == [True], "news of the first bytes")
    assert slot.rank(ALL) == b"x" * 1_000_000
    assert writer.wait(10) == 0
    until(lambda: slot.told == [True, False], "news that it is gone")


def test_a_rank_that_has_ended_well_stops_nobody() -> None:
    slot = Slot(limit=300_000)
    slot.stdin.finish()
    with open(slot.srun, "wb") as srun:
        srun.write(b"x" * 1_000_000)
    until(lambda: slot.told == [True, False], "the rest is thrown away")


@pytest.mark.parametrize("source", ["nothing", "/dev/null"])
def test_no_input(source: str) -> None:
    slot = Slot()
    if source != "nothing":
        slot.fd = os.open(source, os.O_RDONLY)
        slot.stdin = Stdin(slot.told.append, slot.fd)
    slot.ends()
    for _ in range(2):
        assert slot.rank(ALL) == b""
        slot.stdin.rewind()
    assert slot.told == []


def test_a_file_is_read_from_its_start(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(LINES)
    slot = Slot()
    slot.fd = os.open(tmp_path / "in", os.O_RDONLY)
    slot.stdin = Stdin(slot.told.append, slot.fd)
    for _ in range(2):
        assert slot.rank(ALL) == LINES
        slot.stdin.rewind()
    assert slot.told == [True]


@pytest.mark.parametrize(
    ("value", "terminal", "expected"),
    [
        (None, False, StdinFeed.EVERY),
        ("all", False, StdinFeed.EVERY),
        (None, True, StdinFeed.TERMINAL),
        ("none", False, StdinFeed.EVERY),  # nothing comes
        ("3", False, StdinFeed.ONE),
        ("in.txt", True, StdinFeed.FILE),
        ("in.%t", False, StdinFeed.OWN),
    ],
)
def test_where_input_goes(value: str | None, terminal: bool, expected: StdinFeed) -> None:
    assert feed(value, terminal) is expected


@pytest.mark.parametrize(
    ("source", "had", "spares", "standby_nodes", "never"),
    [
        (StdinFeed.EVERY, [], 2, 64, False),
        (StdinFeed.EVERY, [True, True], 2, 0, False),  # spares have had the same
        (StdinFeed.EVERY, [True, False], 2, 64, True),
        (StdinFeed.ONE, [True], 0, 0, False),
        (StdinFeed.OWN, [True], 0, 0, False),
        (StdinFeed.FILE, [True, False], 2, 64, False),
        (StdinFeed.TERMINAL, [True, False], 2, 64, False),
    ],
)
def test_what_a_recovery_may_use(
    source: StdinFeed, had: list[bool], spares: int, standby_nodes: int, never: bool
) -> None:
    found = limited(Means(2, 64, True, 3), source, had)
    assert (found.spares, found.standby_nodes, bool(found.never)) == (spares, standby_nodes, never)


def test_what_a_robust_task_has_kept_dies_with_it() -> None:
    job = Job(2, 0)
    job.say(0, StdinRead(1, 0, False))  # its shim died before there was any
    assert job.node(0).stdin == {}
    for number, whole in ((2, True), (3, False), (4, True)):
        job.say(0, StdinRead(number, 0, whole))
    assert job.node(0).stdin == {0: False}
    job.say(1, StdinRead(1, 1, True))
    job.inbox._reborn(job.node(1))
    assert job.node(1).stdin == {1: False}
