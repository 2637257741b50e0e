"""The records of a node's ranks in memory: what is removed, and what is kept."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from robust_slurm.looked import file_name
from robust_slurm.record import RecordWriter, create, record_path
from srun_wrapper.agent.beats import NodeBeats

KEPT = ("error-0.json", "warm-77-1.json", "warm.lock", "snapshots")


def test_nothing_of_epochs_long_over_stays(tmp_path: Path) -> None:
    beats = NodeBeats(tmp_path)
    for name in KEPT:
        (tmp_path / name).touch()
    for epoch in range(1, 31):
        for rank in (0, 1):
            for kind in ("beat", "modules", "modules.new", "abort"):
                (tmp_path / f"{epoch}-{rank}.{kind}").touch()
        beats.begin(epoch)
    names = {path.name for path in tmp_path.iterdir()}
    assert {name.partition("-")[0] for name in names - set(KEPT)} == {"29", "30"}
    assert names >= set(KEPT)


def test_what_cannot_be_removed_stays_and_the_rest_goes(tmp_path: Path) -> None:
    (tmp_path / "1-0.d").mkdir()
    (tmp_path / "1-1.beat").touch()
    NodeBeats(tmp_path).begin(9)
    assert [path.name for path in tmp_path.iterdir()] == ["1-0.d"]


def test_answers_of_processes_that_have_ended_go(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    for pid in (ended.pid, os.getpid()):
        (tmp_path / file_name(pid, 9)).touch()
    NodeBeats(tmp_path).begin(2)
    assert [path.name for path in tmp_path.iterdir()] == [file_name(os.getpid(), 9)]


def test_a_record_that_a_slot_has_made_anew_is_read_anew(tmp_path: Path) -> None:
    """After a rejoin that failed: the agent went on reading the file of the rank that had ended."""

    def record(beats: int) -> None:
        path = record_path(str(tmp_path), 2, 0)
        Path(path).unlink(missing_ok=True)
        create(path, epoch=2, local_rank=0)
        writer = RecordWriter(path)
        for step in range(beats):
            writer.beat(step)
        writer.close()

    beats = NodeBeats(tmp_path)
    beats.begin(2)
    record(0)
    beats.read()
    record(3)
    assert [beat.beats for beat in beats.read()] == [0]
    beats.forget(0)
    assert [beat.beats for beat in beats.read()] == [3]
