"""The parts of bench.scale that need no lab."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from waiting import until

from bench.common import Results
from bench.scale import usage
from bench.scale.drains import told
from bench.scale.job import LargeJob, shown, sizes
from health.gate.act import DrainOutcome
from robust_slurm import record


def test_the_rank_beats_as_the_library_does(tmp_path: Path) -> None:
    source = Path(str(LargeJob.start.__code__.co_filename)).with_name("rank.c")
    program = tmp_path / "rank"
    subprocess.run(["cc", "-Wall", "-Werror", "-o", str(program), str(source)], check=True)
    path = record.record_path(str(tmp_path), 3, 1)
    record.create(path, epoch=3, local_rank=1, rank=0)
    env = {"ROBUST_BEAT_DIR": str(tmp_path), "ROBUST_EPOCH": "3", "LOCAL_RANK": "1", "RANK": "0"}
    child = subprocess.Popen([str(program), str(tmp_path), "0.01"], env=env)
    reader = record.BeatReader(path)
    try:
        until(lambda: (beat := reader.read()) is not None and beat.beats > 2, "beats")
        beat = reader.read()
        assert beat is not None and not reader.ended()
        assert (beat.pid, beat.epoch, beat.local_rank, beat.rank) == (child.pid, 3, 1, 0)
        assert beat.step == beat.beats and beat.source == "explicit" and beat.grad_norm == 1.0
        until(lambda: int((tmp_path / "step").read_text() or 0) > 2, "the step's file")
    finally:
        child.kill()
        child.wait()
    assert reader.ended()
    assert len((tmp_path / "first_steps.jsonl").read_text().splitlines()) == 1


def process(proc: Path, pid: int, name: str, pss_kib: int, environ: str = "") -> None:
    own = proc / str(pid)
    own.mkdir()
    (own / "comm").write_text(f"{name}\n")
    (own / "smaps_rollup").write_text(f"0-f ---p 0 0:0 0 [rollup]\nRss: 9 kB\nPss: {pss_kib} kB\n")
    (own / "environ").write_text(environ.replace(" ", "\0"))


def test_memory_is_counted_by_name(tmp_path: Path) -> None:
    process(tmp_path, 1, "slurmd", 1000)
    process(tmp_path, 2, "slurmd", 3000)
    process(tmp_path, 3, "other", 5)
    process(tmp_path, 4, "python", 7)
    (tmp_path / "meminfo").touch()
    (tmp_path / "9").mkdir()  # it has ended
    found = usage.by_name(tmp_path, without=[3])
    assert found == {"slurmd": usage.Group(2, 4.096), "python": usage.Group(1, 0.007168)}
    assert usage.pids(tmp_path) == {1, 2, 3, 4, 9}


def test_a_process_is_found_by_what_it_started_with(tmp_path: Path) -> None:
    process(tmp_path, 5, "slurmctld", 1, "A=1 B=2")
    process(tmp_path, 6, "slurmctld", 1, "A=1 B=22")
    process(tmp_path, 7, "slurmd", 1, "A=1 B=2")
    assert usage.find("slurmctld", {"B": "2"}, tmp_path) == [5]


def test_this_process_is_measured() -> None:
    assert usage.rss_mb(os.getpid()) > 1
    assert usage.cpu_s(os.getpid()) > 0
    assert usage.available_mb() > 1


@pytest.mark.parametrize(
    ("outcome", "how"),
    [
        (DrainOutcome(drained=True), "drained"),
        (DrainOutcome(bound="5 other nodes"), "bound"),
        (DrainOutcome(error="no answer"), "failed"),
        (DrainOutcome(kept="repair"), "failed"),
    ],
)
def test_a_drain_is_done_bound_or_failed(outcome: DrainOutcome, how: str) -> None:
    assert told(outcome)["how"] == how


def test_texts_and_single_values() -> None:
    assert sizes("600x4") == (600, 4) and sizes("8") == (8, 1)
    assert shown({"detect": 1.0, "test": 0.0, "launch": 0.25}) == "detect 1.00, launch 0.25"
    results = Results("scale")
    results.once("lab.up_s", 2.5, "s")
    assert results.metrics["lab.up_s"].n == 1 and results.metrics["lab.up_s"].median == 2.5
