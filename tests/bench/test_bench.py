"""The benchmarks' own logic: statistics, finding ranks, reading logs, and the real supervisor."""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.common import MIN_SAMPLES, BenchError, Results, finish, results_for, summarise
from bench.heartbeat.load import CounterFile, Counters
from bench.heartbeat.supervisor import cpu_seconds, rss_mb
from bench.overhead import __main__ as overhead
from bench.overhead.driver import in_turn
from bench.recovery import __main__ as recovery
from bench.recovery.cases import recovered
from bench.recovery.plain import down_at
from bench.training.job import Incident, Training, find_rank, read_lines
from bench.training.rank import Rank
from lab.keeper.ranks import Process


def test_summary_is_median_and_nearest_rank() -> None:
    found = summarise([float(n) for n in range(1, 21)], "s")
    assert (found.median, found.p95, found.n) == (10.5, 19.0, 20)
    with pytest.raises(ValueError, match="no samples"):
        summarise([], "s")


def test_few_samples_are_refused_unless_quick() -> None:
    with pytest.raises(ValueError, match="at least 20"):
        Results("x").add("a.b_s", [1.0] * (MIN_SAMPLES - 1), "s")
    assert Results("x", quick=True).add("a.b_s", [1.0], "s").n == 1


def test_json_has_metrics_ratios_settings(tmp_path: Path) -> None:
    args = argparse.Namespace(quick=False, runs=2, json=tmp_path / "out.json")
    results = results_for("x", args)
    assert results.quick, "a chosen number of runs proves nothing either"
    results.settings["hang_floor_s"] = 10.0
    results.add("slow.total_s", [4.0, 4.0], "s")
    results.add("fast.total_s", [2.0, 2.0], "s")
    results.ratio("slow/fast", "slow.total_s", "fast.total_s")
    assert finish(results, args) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ratios"] == {"slow/fast": 2.0}
    assert written["metrics"]["slow.total_s"]["median"] == 4.0
    assert written["settings"] == {"hang_floor_s": 10.0}


def _process(pid: int, ppid: int, **environ: str) -> Process:
    return Process(pid, ppid, {"BENCH_TOKEN": "t", **environ})


@pytest.mark.parametrize(
    ("processes", "found"),
    [
        ([], None),
        ([_process(5, 1, RANK="1"), _process(6, 1, RANK="0")], 5),
        ([Process(5, 1, {"RANK": "1"}), Process(6, 1, {"RANK": "1", "BENCH_TOKEN": "u"})], None),
        # A rank's children have its environment; the rank is the one nearest to the launcher.
        ([_process(9, 7, RANK="1"), _process(7, 1, RANK="1")], 7),
        # The incarnation that is ending may still be there.
        (
            [
                _process(5, 1, RANK="1", ROBUST_EPOCH="9"),
                _process(6, 1, RANK="1", ROBUST_EPOCH="10"),
            ],
            6,
        ),
    ],
)
def test_find_rank(processes: list[Process], found: int | None) -> None:
    assert find_rank(processes, "t", 1) == found


def test_read_lines_skips_what_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert read_lines(path) == []
    path.write_text('{"a": 1}\n{"a": ')
    assert read_lines(path) == [{"a": 1}]


LOG = """\
[2025-11-21T09:33:10.500] error: Nodes n2 not responding
[2025-11-21T09:33:20.250] error: Nodes n2 not responding, setting DOWN
[2025-11-21T09:43:20.750] error: Nodes n2 not responding, setting DOWN
"""


def test_down_at() -> None:
    first = down_at(LOG, "n2", 0.0)
    assert first % 60 == pytest.approx(20.25)
    assert down_at(LOG, "n2", first) == first + 600.5
    with pytest.raises(ValueError, match="does not say when it gave n3 up"):
        down_at(LOG, "n3", 0.0)


class _Scripted(Training):
    """A training whose incidents are given; no process runs."""

    lines: list[Incident]

    def wait_stepping(self, steps: int = 10) -> None:
        """Always stepping."""

    def incidents(self) -> list[Incident]:
        return self.lines


def _phases(**seconds: float) -> dict[str, float]:
    names = ("detect", "decide", "stop", "replace", "restore", "launch", "first_step")
    return {name: seconds.get(name, 0.0) for name in names}


def _run(*incidents: Incident, **must: str | int) -> dict[str, float]:
    training = _Scripted(lab=None, workload="toy", world=8, directory=Path("none"))  # type: ignore[arg-type]
    training.lines = []

    def fault() -> float:
        training.lines = list(incidents)
        return 100.0

    return recovered(training, fault, "restart", must=must)


def test_detect_runs_from_the_true_fault() -> None:
    phases = _phases(detect=9.0, stop=0.5, launch=0.25, first_step=1.0)
    found = _run(Incident(100.125, "restart", "recovered", phases))
    assert found["detect"] == pytest.approx(0.125)
    assert found["total"] == pytest.approx(1.875)


def test_a_second_incident_in_a_recovery_counts() -> None:
    found = _run(
        Incident(100.5, "restart", "superseded by another failure", _phases(stop=0.5)),
        Incident(102.0, "restart", "recovered", _phases(stop=0.5, first_step=1.0)),
    )
    assert found["detect"] == pytest.approx(0.5)
    assert found["stop"] == pytest.approx(1.0)
    assert found["total"] == pytest.approx(3.5)


def test_another_action_than_measured_is_refused() -> None:
    with pytest.raises(BenchError, match="requeue where restart was expected"):
        _run(Incident(100.5, "requeue", "recovered", _phases()))


def test_a_recovery_that_is_another_than_measured_is_refused() -> None:
    """A rejoin that fell back to forks was counted as a rejoin, and a cold start as a warm one."""
    must: dict[str, str | int] = {"rung": "rejoin", "kept": 7}
    _run(Incident(100.5, "restart", "recovered", _phases(), "rejoin", kept=7), **must)
    for rung, kept in ("in-place", 0), ("rejoin", 6):
        with pytest.raises(BenchError, match=rf"'kept': {kept}.*'kept': 7"):
            _run(Incident(100.5, "restart", "recovered", _phases(), rung, kept=kept), **must)
    with pytest.raises(BenchError, match=r"'warm': 3.*'warm': 4"):
        _run(Incident(100.5, "restart", "recovered", _phases(), "standby", warm=3), warm=4)


def test_every_case_of_recovery_exists() -> None:
    names = [name for group in recovery.WORKLOADS.values() for name in group]
    made = recovery.make_cases(None, names)  # type: ignore[arg-type]
    assert sorted([*made, recovery.PLAIN]) == sorted(names)
    assert {name for pair in recovery.RATIOS for name in pair} <= set(names)


def test_what_is_measured_is_written_after_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of an hour that was ended in its last minutes had left nothing."""
    file = tmp_path / "out.json"

    def ended(names: object, runs: int, failed: set[str], after_round: Callable[..., None]) -> None:
        failed.add("hang")
        after_round({"rank_kill": [{"total": 0.5}], "hang": [{"total": 9.0}]})
        raise KeyboardInterrupt

    monkeypatch.setattr(recovery, "take_turns", ended)
    with pytest.raises(KeyboardInterrupt):
        recovery.measure(Results("recovery"), ["rank_kill", "hang"], file)
    left = json.loads(file.read_text(encoding="utf-8"))
    assert left["quick"] and set(left["metrics"]) == {"rank_kill.total_s"}


def test_overhead_pairs_neighbours() -> None:
    notes = [
        {"what": "step", "launcher": launcher, "value": value}
        for launcher, value in (("srun", 1.0), ("robust-srun", 2.0), ("srun", 10.0))
    ]
    notes += [{"what": "step", "launcher": "robust-srun", "value": 30.0}, {"what": "done"}]
    results = Results("overhead", quick=True)
    overhead._add(results, "step", overhead._sorted(notes), "step")
    assert results.metrics["step.paired_ratio"].median == 2.5
    assert results.metrics["step.extra_s"].p95 == 20.0
    assert in_turn(0) == in_turn(1)[::-1]


def test_rank_knows_itself_under_any_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert (Rank(tmp_path).rank, Rank(tmp_path).world) == (3, 4)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    first = Rank(tmp_path)
    assert (first.rank, first.world) == (0, 2)
    for step in range(1, 31):
        first.stepped(step, 0.5 if step > 20 else 9.0)
    first._seconds[1] = [1.0, 3.0]
    first._began -= 2.5
    first.done()
    assert int((tmp_path / "step").read_text()) == 30
    result = json.loads((tmp_path / "result.json").read_text())
    seconds = result.pop("seconds")
    assert result == {"step_s": 0.5, "steps": 10}
    assert len(seconds) == 2, "the third is not over"
    assert 4.0 < seconds[0] < 7.0 and seconds[1] == 2.0
    notes = read_lines(tmp_path / "first_steps.jsonl")
    assert [(n["rank"], n["step"]) for n in notes] == [(0, 1)]


def test_counters_and_proc(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    writer, reader = CounterFile(path, create=True), CounterFile(path)
    assert reader.read() == Counters()
    writer.write(Counters(7, 1.5, 2.5, 3.5))
    assert reader.read() == Counters(7, 1.5, 2.5, 3.5)
    assert cpu_seconds(os.getpid()) > 0
    assert 1 < rss_mb(os.getpid()) < 100_000


def test_supervisor_holds_a_small_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real supervisor and the feeder, over real sockets, with few nodes."""
    from bench.heartbeat import supervisor as supervisor_case

    monkeypatch.setenv("BENCH_NODES", "20")
    with supervisor_case.loaded() as (pid, counters):
        started = supervisor_case._until(counters, lambda c: c.started > 0)
        assert started.connected <= started.complete <= started.started
        # Each node reports again and again, and none is taken for lost.
        supervisor_case._until(counters, lambda c: c.messages >= 20 * (1 + 8 + 4))
        assert rss_mb(pid) < 300
