"""bench.data: packing as they come, what is counted as lost, balance, and a short run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from bench.common import REPOSITORY, Results
from bench.data import __main__ as command
from bench.data import balance, random_plans, throughput
from bench.data.corpus import MARK, Corpus, kind, make, tokenise
from bench.data.faults import Log, Seen, compare, seen
from bench.data.packing import Packer, arrival_rows, padded
from bench.data.process import Kept
from robust_slurm.data.planning import planner


def test_documents_are_packed_as_they_come() -> None:
    assert arrival_rows([3, 4, 2, 9, 1, 4], pack=6) == [[3], [4, 2], [6], [3, 1]]
    packer = Packer(6)
    (row,) = packer.add(numpy.array([5, 5])) + packer.add(numpy.array([7, 7, 7, 7, 7]))
    again = Packer(6, packer.pending)
    assert [len(piece) for piece in again.add(numpy.array([1, 1]))[0]] == [5]
    made = padded(row, 6)
    assert made["tokens"].tolist() == [5, 5, 0, 0, 0, 0]
    assert made["document_ids"].tolist() == [0, 0, -1, -1, -1, -1]
    assert made["position_ids"].tolist() == [0, 1, 0, 0, 0, 0]


def test_the_corpus_follows_from_its_seed(tmp_path: Path) -> None:
    one, two = (Corpus(tmp_path / name, 2, 2, 3) for name in ("one", "two"))
    assert make(one) == make(two)
    paths = one.paths("s00")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in two.paths("s00")]
    record = json.loads(paths[1].read_text().splitlines()[0])
    tokens = tokenise(record)["tokens"]
    assert (tokens[0], len(tokens)) == (MARK + 3, len(record["text"].split()) + 1)
    assert [kind(name) for name in one.names()] == ["jsonl", "parquet"]


def test_what_is_lost_or_comes_twice_is_counted() -> None:
    def log(*steps: list[int]) -> Log:
        made = Log()
        for number, documents in enumerate(steps):
            tokens = numpy.array([MARK + document for document in documents])
            made.add(number, [seen({0: {"tokens": tokens}})])
        return made

    should = log([1, 2], [3, 4])
    assert compare(log([1, 2], [3, 4]), should) == {"lost": 0, "repeated": 0, "other_steps": 0}
    assert compare(log([1, 2], [4, 3]), should) == {"lost": 0, "repeated": 0, "other_steps": 1}
    assert compare(log([1, 2], [3, 2]), should) == {"lost": 1, "repeated": 1, "other_steps": 1}
    resumed = log([1, 2], [3, 4], [9])
    resumed.resume(1)
    assert list(resumed.steps) == [0]
    resumed.add(1, [Seen(should.steps[1].digests, [4, 3])])  # of other ranks, in another order
    assert resumed.order() == should.order()
    assert compare(resumed, should) == {"lost": 0, "repeated": 0, "other_steps": 0}
    resumed.add(0, [Seen({0: "other rows"}, [1, 2])])
    assert compare(resumed, should)["other_steps"] == 1


@pytest.mark.parametrize("seed", [0, 4])
def test_random_plans_show_a_planner_that_is_wrong(
    seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert random_plans.is_right(seed)

    draw = planner._Place.draw

    def loses_one(place: Any, epochs: int | None) -> Any:
        if place._drawn == 3:
            draw(place, epochs)
        return draw(place, epochs)

    monkeypatch.setattr(planner._Place, "draw", loses_one)
    assert not random_plans.is_right(seed)
    assert f"plan {seed} is wrong: Wrong: " in capsys.readouterr().out


def test_who_would_kill_a_data_process_that_is_stopped_is_stopped_as_well() -> None:
    rank, kept = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    with rank, kept:
        try:
            works: Any = throughput._of_side
            assert set(works(rank, kept)) == {rank.pid, kept.pid}
            assert works(rank, None) == [rank.pid]
        finally:
            for process in (rank, kept):
                process.kill()


def test_who_keeps_data_processes_ends_although_it_is_stopped() -> None:
    kept = Kept.__new__(Kept)
    kept._process = subprocess.Popen(["sleep", "60"])
    kept._process.send_signal(signal.SIGSTOP)
    os.waitpid(kept._process.pid, os.WUNTRACED)
    kept.close()
    assert kept._process.wait(10) == -signal.SIGTERM


def test_balance_is_of_the_same_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "SIZES", (4,))
    results = Results("data", quick=True, runs=3)
    balance.balance(results)
    ours = results.metrics["balance_4.ours.ranks"].median
    assert 1.0 <= ours < 1.05 < results.metrics["balance_4.arrival.ranks"].median
    assert results.metrics["balance_4.ours.rows_least"].median >= 1.0
    assert command.missed(results) == []
    micro = [results.metrics[f"balance_4.ours.{what}"].median for what in ("micro_4", "micro_2")]
    assert ours <= micro[0] <= micro[1] <= results.metrics["balance_4.ours.rows"].median
    results.once("balance_8.ours.ranks", 1.2, "max/mean")
    assert command.missed(results) == ["balance_8.ours.ranks: 1.2, more than 1.05"]


def test_goals_that_depend_on_the_machine_are_those_of_a_quiet_one() -> None:
    results = Results("data")
    results.once("restart.ours.first_batch_s", 0.02, "s")
    results.ratios["throughput.ours/stateful"] = 0.9
    assert command.missed(results, 2.5) == []
    assert command.missed(results, 0.5) == [
        "restart.ours.first_batch_s: 0.02, more than 0.01",
        "throughput.ours/stateful: 0.9, less than 1",
    ]
    assert command.missed(Results("data", quick=True), 0.5) == []


@pytest.mark.slow
def test_nothing_is_lost_over_a_few_faults(tmp_path: Path) -> None:
    """The real data process under robust-task's code, with real ranks."""
    made = tmp_path / "made.json"
    words = ["--case", "exact", "--runs", "3", "--json", str(made)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.data", *words], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: each["median"] for name, each in json.loads(made.read_text())["metrics"].items()}
    assert found["exact.faults"] == 3
    goals = ("wrong", "lost", "repeated", "other_steps")
    assert [found[f"exact.{what}"] for what in goals] == [0, 0, 0, 0]
    assert found["exact.plans"] == 3
    assert found["exact.documents"] > 50
