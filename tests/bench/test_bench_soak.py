"""The pure parts of the soak: its draws, what it reads of the training, and what may not grow."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.chaos import rank
from bench.faults import usage
from bench.faults.kind import SOON
from bench.faults.kinds import KINDS
from bench.faults.soak import SURVIVED, Steps, draws
from bench.faults.usage import Usage

QUIET = Usage(60.0, 40, 8, 40.0, 30, 4, 60, 12)


def test_every_kind_comes_once_before_any_comes_again() -> None:
    found = list(itertools.islice(draws(random.Random(1), "abcd"), 12))
    assert [sorted(found[i : i + 4]) for i in (0, 4, 8)] == [list("abcd")] * 3


def test_the_kinds_of_the_soak_end_no_job() -> None:
    assert set(SURVIVED) <= set(KINDS) and len(SURVIVED) == len(set(SURVIVED))
    for name in SURVIVED:
        kind = KINDS[name]
        assert not kind.error or kind.where.endswith("once") or name == "ecc"
        assert kind.case(0).options in ("", SOON)


def test_steps_are_read_once_and_whole(tmp_path: Path) -> None:
    steps = Steps(tmp_path / "steps")
    steps.read()
    assert steps.best == 0
    steps.path.write_text("1.0 1\n1.1 2\n1.2")
    steps.read()
    assert steps.made == [(1.0, 1), (1.1, 2)]
    steps.path.write_text("1.0 1\n1.1 2\n1.2 3\n1.9 2\n")
    steps.read()
    assert steps.made[2:] == [(1.2, 3), (1.9, 2)] and steps.best == 3


@pytest.mark.parametrize(
    ("part", "more", "said"),
    [
        ("srun_rss_mb", 30.0, False),
        ("srun_rss_mb", 50.0, True),
        ("task_fds", 10, False),
        ("task_fds", 40, True),
        ("processes", 30, True),
    ],
)
def test_growth(part: str, more: float, said: bool) -> None:
    last = replace(QUIET, **{part: getattr(QUIET, part) + more})
    found = usage.grown([QUIET] * 10 + [last] * 5)
    assert [line.split(":")[0] for line in found] == [part] * said


def test_a_program_takes_its_order_once(tmp_path: Path) -> None:
    (tmp_path / "order.3").write_text("40 n2 no such expert: 9")
    assert rank.ordered(tmp_path, 3, "n2", 39, 0.0) == ""
    assert rank.ordered(tmp_path, 3, "n4", 40, 0.0) == ""
    assert rank.ordered(tmp_path, 3, "n2", 41, time.time() + 1) == ""  # it started after it
    assert rank.ordered(tmp_path, 3, "n2", 41, 0.0) == "no such expert: 9"
    assert rank.ordered(tmp_path, 3, "n2", 42, 0.0) == ""
