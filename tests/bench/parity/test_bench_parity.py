"""Judging a way under robust-srun beside srun, and that the battery is what its page says."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.common import Results
from bench.parity.__main__ import describe, main, record
from bench.parity.cases import BATTERY, WAYS
from bench.parity.judge import Remains, leftovers, only_slower, own_lines, refused, void, worse
from bench.parity.pair import NODES, Outcome
from bench.parity.trial import PROGRAMS, _fill, _starts
from bench.parity.way import Way

GOOD = Remains(
    seconds=30.0,
    out=("rank 0 is done",),
    files={"final.json": "a"},
    starts=((0, "0"), (1, "1")),
)
AGAIN = (*GOOD.starts, *GOOD.starts)
WAY = Way(name="one", kind="A", tells="a way")


@pytest.mark.parametrize(
    ("change", "points"),
    [
        ({}, []),
        ({"seconds": 38.0}, []),
        ({"seconds": 38.1}, ["slower: 38 s instead of 30 s"]),
        ({"code": 120}, ["exit code 120 instead of 0"]),
        ({"code": None}, ["never ended instead of 0"]),
        ({"state": "FAILED"}, ["job FAILED instead of COMPLETED"]),
        ({"scripts": 2}, ["the script began 2 times instead of 1"]),
        ({"starts": AGAIN}, ["4 starts of ranks instead of 2"]),
        ({"starts": ((1, "1"), (0, "0"))}, []),
        ({"starts": ((0, "s1"), (1, "1"))}, ["ranks on 0:s1 1:1 instead of 0:0 1:1"]),
        ({"starts": ()}, ["ranks on no node instead of 0:0 1:1"]),
        ({"files": {}}, ["files are missing: final.json"]),
        ({"files": {"final.json": "b"}}, ["another result: final.json"]),
        ({"files": {"final.json": "a", "core": "c"}}, ["files more: core"]),
        ({"out": ()}, ["standard output: 'rank 0 is done' is missing"]),
        ({"out": (*GOOD.out, "x")}, ["standard output: 'x' is more"]),
        ({"out": (*GOOD.out, *GOOD.out)}, ["standard output: 2 lines instead of 1"]),
        ({"err": ("oh",)}, ["standard error: 'oh' is more"]),
    ],
    ids=str,
)
def test_what_counts_as_worse(change: dict[str, Any], points: list[str]) -> None:
    assert worse(GOOD, replace(GOOD, **change), err=True) == points


def test_what_a_way_need_not_compare() -> None:
    other = replace(GOOD, out=("time 3.1",), err=("warning",))
    assert worse(GOOD, other, out=False) == []
    failed = replace(GOOD, code=3, state="FAILED")
    again = replace(failed, starts=AGAIN, seconds=90.0)
    assert worse(failed, again, restarts=True) == []
    assert len(worse(failed, again)) == 2


@pytest.mark.parametrize(
    ("change", "points"),
    [
        ({"starts": AGAIN}, []),
        ({"starts": (*GOOD.starts, (1, "0"), (0, "1"))}, []),
        ({"starts": (*GOOD.starts, (1, "s1"))}, ["ranks in the end on nodes 0 s1 instead of 0 1"]),
        ({"starts": (*GOOD.starts, (1, "0"))}, ["ranks in the end on nodes 0 instead of 0 1"]),
        ({"starts": ()}, ["ranks in the end on nodes none instead of 0 1"]),
        ({"seconds": 38.0}, []),
        ({"seconds": 38.1}, ["slower: 38 s instead of 30 s"]),
    ],
    ids=str,
)
def test_where_ranks_may_be_started_again(change: dict[str, Any], points: list[str]) -> None:
    assert worse(GOOD, replace(GOOD, **change), restarts=True) == points


def test_an_option_may_be_refused_at_once_and_in_one_line() -> None:
    no = Remains(code=2, said=("robust-srun: --bcast is not supported",), seconds=0.5)
    assert refused(no, "--bcast")
    assert worse(GOOD, no, refusal="--bcast") == []
    assert not refused(no, "--multi-prog")
    assert not refused(replace(no, code=0), "--bcast")
    assert not refused(replace(no, seconds=20.0), "--bcast")
    assert not refused(replace(no, said=(*no.said, "robust-srun: and more")), "--bcast")


def test_only_the_time_may_be_another_programs_fault() -> None:
    slow = worse(GOOD, replace(GOOD, seconds=60.0))
    assert only_slower(slow)
    assert not only_slower([])
    assert not only_slower(worse(GOOD, replace(GOOD, seconds=60.0, code=1)))


def test_a_way_that_srun_does_not_end_as_planned_proves_nothing() -> None:
    assert void(GOOD, 0, "COMPLETED") == ""
    assert void(GOOD, 3, "FAILED") == "under srun: exit code 0 and COMPLETED, not 3 and FAILED"
    broken = Outcome(WAY, srun=replace(GOOD, code=1), robust=replace(GOOD, code=0))
    assert broken.void and broken.worse == []
    assert describe(broken).startswith("one: void: under srun: exit code 1")


def test_only_what_srun_does_not_leave_counts_as_left_over() -> None:
    one = replace(GOOD, leftovers=("process sleep 9",))
    assert leftovers(one, one) == []
    two = replace(GOOD, leftovers=("process sleep 9", "process sleep 9", "job x"))
    assert leftovers(one, two) == ["process sleep 9", "job x"]


def test_standard_error_without_what_slurm_and_robust_srun_say() -> None:
    text = "b\nrobust-srun: testing 2 nodes\na\nsrun: error: n4: task 1: Exited with exit code 3\n"
    assert own_lines(text) == ("a", "b")


def test_a_rank_is_placed_by_its_node_in_the_jobs_list() -> None:
    places = {"7": ["n4", "n5"]}
    assert _starts("7 1 n5\n7 0 n4\n7 1 s1\n", places) == ((1, "1"), (0, "0"), (1, "s1"))


def test_braces_of_the_shell_stay() -> None:
    assert _fill("{launcher} ${A} { b; } $(c)", {"launcher": "srun"}) == "srun ${A} { b; } $(c)"


def test_the_record_counts_ways_not_points() -> None:
    results = Results("parity", quick=True)
    lost = replace(GOOD, code=120, state="FAILED", seconds=80.0, blamed=("n1", "n2"))
    left = replace(GOOD, leftovers=("job standby",))
    record(
        results,
        [
            Outcome(WAY, srun=GOOD, robust=GOOD),
            Outcome(replace(WAY, name="two"), srun=GOOD, robust=lost),
            Outcome(replace(WAY, name="three"), srun=GOOD, robust=left),
            Outcome(replace(WAY, name="four"), "LabError: no"),
        ],
    )
    found = {name: metric.median for name, metric in results.metrics.items()}
    assert found == {
        "one.srun_s": 30.0,
        "one.robust_s": 30.0,
        "two.srun_s": 30.0,
        "two.robust_s": 80.0,
        "three.srun_s": 30.0,
        "three.robust_s": 30.0,
        "parity.cases": 3,
        "parity.worse": 1,
        "parity.nodes_blamed": 2,
        "parity.leftovers": 1,
        "parity.void": 1,
    }
    assert results.settings["worse: two"].endswith("; blamed n1 n2")


# -- the battery


def test_the_battery_is_as_large_as_its_page_says() -> None:
    page = Path("docs/bench.md").read_text(encoding="utf-8")
    named = re.search(r"(\d+) ways to run", page)
    assert named and int(named[1]) == len(WAYS) == len(BATTERY)
    kinds = Counter(way.kind for way in BATTERY)
    assert set("ABCDEFGH") <= set(kinds)
    assert kinds["user"] >= 10
    assert sum(not way.long for way in BATTERY) >= 120


def test_every_way_can_be_run() -> None:
    for way in BATTERY:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", way.name), way.name
        assert way.tells and way.nodes <= NODES, way.name
        texts = (way.program, way.options, way.before, way.lines)
        for name in re.findall(r"\{programs\}/([\w.]+)", " ".join(texts)):
            there = (PROGRAMS / name).exists() or (PROGRAMS / f"{name}.c").exists()
            assert there or name in ("csave.so", ".."), f"{way.name}: {name}"


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(WAYS)
    assert lines[0].split()[:2] == [BATTERY[0].name, BATTERY[0].kind]
