"""The certified states: the timeline, and the marks in the durable directory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from checkpointed_job import CheckpointedJob
from durable_tiers import commit_now, tiny

from robust_slurm.checkpoint.durable import marks
from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.dcp.write import write
from robust_slurm.checkpoint.durable.marks import Mark
from robust_slurm.checkpoint.durable.prune import prune
from robust_slurm.checkpoint.listing import read_listing
from robust_slurm.checkpoint.planning.sound import Bound
from srun_wrapper.checkpoints.certificates import Certificates, Timeline, spoils
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure, Symptom
from srun_wrapper.protocol.checkpoint_messages import Saved


def line_with(proven: int, *equal: int, sharers: int = 2) -> Timeline:
    line = Timeline()
    line.begin(1, 0)
    line.sharers = sharers
    line.prove([proven], None)
    for step in equal:
        alike(line, step)
    return line


def alike(line: Timeline, step: int) -> None:
    for rank in range(line.sharers):
        line.alike(step, rank)


def test_a_finite_loss_and_equal_replicas() -> None:
    line = line_with(8, 4, 8, 12)
    assert [s for s in range(16) if line.covers(s, 1)] == [4, 8]  # 12 waits for its loss
    assert line.mark(8) == Mark(True, True) and line.mark(7) == Mark(True, False)
    line.alike(6, 1)
    line.alike(6, 1)  # the other one was not heard
    assert not line.covers(6, 1)


def test_without_replicas_a_finite_loss_is_all_there_is() -> None:
    line = line_with(8, sharers=0)
    assert line.covers(8, 1) and not line.covers(9, 1)
    assert line.mark(8) == Mark(True, None)


def test_no_loss_no_certificate() -> None:
    line = Timeline()
    line.begin(1, 0)
    line.prove([], None)
    assert not line.covers(0, 1) and not line.covers(4, 1)


def test_the_slowest_rank_that_tells_losses_decides() -> None:
    line = line_with(8, sharers=0)
    line.prove([9, 12, 10], None)
    assert line.proven == 9
    line.prove([13, 12], 11)  # of a rank whose loss is not finite
    assert line.proven == 11


def test_nothing_after_the_first_difference_is_certified() -> None:
    """Ranks that differ may then save all of their own, which nobody can compare."""
    line = line_with(20, 4, 8)
    alike(line, 16)
    line.differ(12)
    line.sharers = 0
    assert [s for s in (4, 8, 12, 16, 20) if line.covers(s, 1)] == [4, 8]
    line.begin(2, 8)
    line.sharers = 2
    line.prove([14], None)
    alike(line, 12)
    assert line.covers(12, 2) and not line.covers(12, 1)


def test_an_epoch_abandons_what_comes_after_where_it_resumes() -> None:
    line = line_with(9, sharers=0)
    line.begin(2, 7)
    assert line.covers(7, 1) and not line.covers(8, 1) and not line.covers(8, 2)
    line.prove([], 6)  # the first loss was not finite: 7 had been proven before
    assert line.covers(7, 1) and not line.covers(8, 2)
    line.begin(3, 0)  # nobody knows where the ranks resumed
    assert not line.covers(7, 1)


@pytest.mark.parametrize(
    ("symptom", "proven", "evidence", "why"),
    [
        ("nan", (), ("loss of rank 0 on n1 is nan",), "a loss was not finite"),
        ("sdc", (), ("rank 2 on n2 held other bits",), "a rank's state was spoilt"),
        ("crash", ("n1",), ("n1: active-gemm-wrong cpu: 1 of 256",), "n1 computed wrongly"),
        ("hang", ("n1",), ("n1: active-gemm-slow gpu 0: 3 TFLOP/s",), ""),
        ("hang", ("n1",), ("x", "n1: active-pair-slow", "n1: active-memory-wrong"), "n1 computed"),
        ("crash", (), ("exit code 1",), ""),
        ("node_lost", (), ("no answer",), ""),
    ],
)
def test_which_failures_put_states_in_doubt(
    symptom: Symptom, proven: tuple[str, ...], evidence: tuple[str, ...], why: str
) -> None:
    root = Failure(symptom, 1.0, 0.0, "n1", 0)
    found = spoils(Diagnosis(symptom, "node", proven, evidence, "x", root, proven=proven))
    assert found.startswith(why) and bool(found) == bool(why)


def test_what_ranks_report_while_they_train() -> None:
    """Checksums of every byte alone certify; either kind tells what two ranks differ in."""

    async def run() -> None:
        job = CheckpointedJob()
        for rank in range(4):
            job.enrol(rank, needs=(0, 1) if rank < 2 else (2, 3))
        line = job.certificates.line
        job.certificates.begin(1, 0)
        job.state.world.by_rank[0].proven = 20

        def report(rank: int, *checksums: tuple[int, int]) -> None:
            saved = Saved(1, rank, checksums[-1][0], None, 9, 0.0, 0.0, checksums)
            job.checkpoints.heard(job.nodes[rank], saved)

        for rank in (0, 1, 2):
            report(rank, (3, 10 + rank // 2 * 4), (4, 101 + rank // 2 * 8))
        job.certificates.trust([], [])
        assert line.mark(4) == Mark(True, False)  # rank 3 was not heard
        report(3, (3, 14), (4, 109))
        assert line.mark(4) == Mark(True, True) and line.mark(3) == Mark(True, False)
        report(0, (7, 30), (8, 201))
        report(1, (7, 30), (8, 203))
        assert [s for s in range(20) if line.covers(s, 1)] == [4]

    asyncio.run(run())


# -- on disk


def steps(tier: Path, *numbers: int, attempt: str = "7.e1") -> None:
    for step in numbers:
        write(str(tiny(tier.parent / "own.safetensors", step)), tier, attempt)
        commit_now(tier, step, attempt=attempt, keep=99)


def job_of(tier: Path) -> tuple[CheckpointedJob, Certificates]:
    job = CheckpointedJob()
    job.enrol(0, directory=str(tier), needs=(0, 1))
    return job, job.certificates


def test_marks_are_written_when_a_step_is_certified(tmp_path: Path) -> None:
    steps(tmp_path, 4, 8, 12)

    async def run() -> None:
        job, certificates = job_of(tmp_path)
        certificates.begin(1, 0)
        for step in (4, 8, 12):
            certificates.durable(step)
            certificates.line.alike(step, 0)
        job.state.world.by_rank[0].proven = 9
        certificates.look(0.0)
        assert certificates._writing is not None
        await certificates._writing
        assert certificates.newest == 8

    asyncio.run(run())
    found = {c.step: c.mark for c in durable.committed(tmp_path)}
    assert found == {4: Mark(True, True), 8: Mark(True, True), 12: Mark()}
    rows = {row.step: row.mark for row in read_listing(tmp_path).steps}
    assert rows == {4: "finite loss, equal replicas", 8: "finite loss, equal replicas", 12: ""}
    later = CheckpointedJob().certificates  # of another job
    assert later.trust([], durable.committed(tmp_path)).disk == {4, 8}


def test_what_is_doubted_is_not_used_again(tmp_path: Path) -> None:
    steps(tmp_path, 4, 8, 12)

    async def run() -> None:
        _, certificates = job_of(tmp_path)
        await certificates.doubt(durable.committed(tmp_path), 4, "a loss was not finite")

    asyncio.run(run())
    found = durable.committed(tmp_path)
    assert [c.step for c in found if c.mark.doubt] == [8, 12]
    assert CheckpointedJob().certificates.trust([], found).doubted == {8, 12}
    assert [(r.mark, r.note) for r in read_listing(tmp_path).steps][2] == (
        "doubted",
        "a loss was not finite",
    )


def test_a_mark_is_of_one_attempt(tmp_path: Path) -> None:
    steps(tmp_path, 4, attempt="7.e1")
    marks.write(tmp_path / "step-00000004", "7.e1", Mark(True, True))
    assert durable.committed(tmp_path)[0].mark.certified
    steps(tmp_path, 4, attempt="7.e2")
    assert durable.committed(tmp_path)[0].mark == Mark()


GOOD = {"version": 1, "attempt": "7.e1", "finite": True, "replicas": None, "doubt": ""}


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"[]", b"{}", b"\xff", b"[" * 5000, b" " * (1 << 17)),
        *(
            json.dumps({**GOOD, **change}).encode()
            for change in (
                {"version": 2}, {"attempt": "x"}, {"finite": 1}, {"replicas": 3}, {"doubt": []}
            )
        ),
    ],
)  # fmt: skip
def test_a_mark_that_this_cannot_have_written_is_none(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "7.e1-mark.json").write_bytes(raw)
    assert marks.read(tmp_path, "7.e1") == Mark()
    (tmp_path / "7.e1-mark.json").write_text(json.dumps(GOOD))
    assert marks.read(tmp_path, "7.e1") == Mark(True)


@pytest.mark.parametrize(
    ("certified", "doubted", "keep", "left"),
    [
        ([], [], 2, [12, 16]),
        ([4], [], 2, [4, 12, 16]),
        ([4, 8], [], 2, [8, 12, 16]),
        ([4, 12], [], 2, [12, 16]),
        ([4], [12], 2, [4, 8, 16]),  # a doubted step is none of those that are kept
        ([4], [12, 16], 1, [4, 8, 12, 16]),  # after the newest good one they stay for now
        ([], [4, 8, 12, 16], 1, [4, 8, 12, 16]),
    ],
)
def test_pruning_keeps_the_newest_certified_step(
    tmp_path: Path, certified: list[int], doubted: list[int], keep: int, left: list[int]
) -> None:
    steps(tmp_path, 4, 8, 12, 16)
    for step in (4, 8, 12, 16):
        mark = Mark(step in certified, None, "why" if step in doubted else "")
        marks.write(tmp_path / f"step-{step:08d}", "7.e1", mark)
    done = [c.step for c in durable.committed(tmp_path) if not c.mark.doubt]
    prune(tmp_path, keep, max(done, default=0))
    assert [c.step for c in durable.committed(tmp_path)] == left
    assert len(list(tmp_path.iterdir())) == len(left)


def test_a_loss_that_is_not_finite_takes_back_what_other_ranks_have_proven(tmp_path: Path) -> None:
    job, certificates = job_of(tmp_path)
    certificates.begin(1, 0)
    job.state.world.by_rank[0].proven = 9
    certificates.trust([], [])
    assert certificates.line.proven == 9
    job.state.nonfinite.bound, job.state.nonfinite.since = Bound(7, 1), 1.0
    certificates.trust([], [])
    assert certificates.line.proven == 7
