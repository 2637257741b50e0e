"""Files that robust-status reads: torn, hostile, huge, or made by another user."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from status_records import accusation, incident, roster

from robust_slurm.state_dir import files
from robust_slurm.state_dir.files import (
    INCIDENTS_BYTES,
    MAX_INCIDENTS,
    read_incidents,
    read_jobs,
    read_state,
)
from robust_slurm.state_dir.records import (
    amend,
    incident_from,
    incidents_from,
    node_report_from,
    roster_from,
)


def test_torn_and_bad_lines_are_skipped_and_counted() -> None:
    good = json.dumps(incident()).encode()
    found, bad, torn = incidents_from(good + b"\n{not json\n\n[]\n" + good + b"\n" + good[:40])
    assert (len(found), bad, torn) == (2, 2, True)
    assert incidents_from(b"") == ([], 0, False)
    assert incidents_from(good + b"\n")[2] is False
    former = incident_from(incident(action="swap_companion"))
    assert former is not None and former.action == "swap_standby"


def back(node: str, *, time: float, cause: str = "transient", **changes: Any) -> dict[str, Any]:
    """Return a withdrawal; ``time``: seconds after the incident."""
    made = accusation(node=node, time=incident()["time"] + time, cause=cause, **changes)
    return {**made, "withdrawn": "answered again"}


FLAP = "the report against n2 is withdrawn: answered again"


@pytest.mark.parametrize(
    ("suspects", "withdrawals", "cause", "left", "lines"),
    [
        ("n2", [back("n2", time=3)], "transient", "", 1),
        ("n2 n3", [back("n2", time=3)], "node", "n3", 1),
        ("n2 n3", [back("n2", time=3), back("n3", time=4)], "transient", "", 2),
        ("n2 n3", [back("n3", time=9), back("n2", time=3)], "transient", "", 2),
        ("n2", [back("n2", time=3, cause="shared")], "shared", "", 1),
        ("n2", [back("n2", time=3, incident="i2")], "node", "n2", 0),
        ("n2", [back("n2", time=3, cause="")], "node", "n2", 0),  # of an older version
        ("n2", [], "node", "n2", 0),
    ],
)
def test_a_withdrawal_amends_the_incident(
    tmp_path: Path,
    suspects: str,
    withdrawals: list[dict[str, Any]],
    cause: str,
    left: str,
    lines: int,
) -> None:
    reports = tmp_path / "accusations"
    reports.mkdir()
    record = incident(suspects=suspects.split())
    (tmp_path / "incidents.jsonl").write_text(json.dumps(record) + "\n")
    (reports / "n2.i1.json").write_text(json.dumps(accusation()))
    for each in withdrawals:
        name = f"{each['node']}.{each['incident']}.withdrawn.json"
        (reports / name).write_text(json.dumps(each))
    (found,), problems = read_incidents(tmp_path)
    assert (found.cause, found.suspects, problems) == (cause, tuple(left.split()), [])
    assert len(found.amended) == lines and (FLAP in found.amended) is bool(lines)
    assert found.evidence == ("silent for 3 s", "ping failed"), "it is what was seen"


def test_of_a_requeued_jobs_incidents_the_nearest_is_amended() -> None:
    early, late = incident(), incident(time=incident()["time"] + 500)
    both = [one for one in map(incident_from, (early, late)) if one]
    for seconds, causes in ((3, ["transient", "node"]), (503, ["node", "transient"])):
        withdrawal = node_report_from(back("n2", time=seconds))
        assert withdrawal is not None
        assert [one.cause for one in amend(both, [withdrawal])] == causes


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_hostile_values_become_plain_ones(data: st.DataObject) -> None:
    for build, example in (
        (roster_from, roster()),
        (incident_from, incident()),
        (node_report_from, accusation()),
    ):
        changed = dict(example)
        for key in data.draw(st.lists(st.sampled_from(sorted(example)), max_size=4)):
            changed[key] = data.draw(json_values)
        made = build(changed)
        if made is not None:
            json.dumps(asdict(made), allow_nan=False)
            assert all(text.isprintable() for text in texts(asdict(made)))


HURTING = [
    b"[" * 100_000,
    b'{"job_id":1e999,"updated":NaN}',
    b'{"job_id":' + b"9" * 5000 + b"}",
    b"\xff\xfe\x00",
    b"null",
    b"",
]


@pytest.mark.parametrize("content", HURTING, ids=range(len(HURTING)))
def test_hurting_files_are_told_not_raised(tmp_path: Path, content: bytes) -> None:
    job = tmp_path / "jobs" / "7"
    (job / "accusations").mkdir(parents=True)
    (job / "roster.0.json").write_bytes(content)
    (job / "accusations" / "n1.x.json").write_bytes(content)
    found = read_state(tmp_path)
    assert (found.rosters, found.reports) == ([], [])
    assert len(found.problems) == 2


def test_links_pipes_and_huge_files_are_not_read(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "7"
    (job / "accusations").mkdir(parents=True)
    (tmp_path / "elsewhere.json").write_text(json.dumps(roster()))
    (job / "roster.0.json").symlink_to(tmp_path / "elsewhere.json")
    os.mkfifo(job / "roster.1.json")
    with (job / "accusations" / "n1.a.json").open("wb") as file:
        file.truncate(1 << 30)
    found = read_state(tmp_path)
    assert (found.rosters, found.reports) == ([], [])
    assert any("not a regular file" in problem for problem in found.problems)
    assert any("larger than" in problem for problem in found.problems)


def test_only_the_newest_end_of_a_huge_incident_file_is_read(tmp_path: Path) -> None:
    job = tmp_path / "jobs" / "7"
    job.mkdir(parents=True)
    line = json.dumps(incident(evidence=["x" * 1000])).encode() + b"\n"
    count = INCIDENTS_BYTES // len(line) + 100
    (job / "incidents.jsonl").write_bytes(line * count)
    found, problems = read_incidents(job)
    assert len(found) == MAX_INCIDENTS < count
    assert problems == [f"{job}/incidents.jsonl: only the newest 1000 incidents were read"]


def test_what_others_made_for_a_job_is_not_its_record(tmp_path: Path) -> None:
    """Running jobs are seen even if the listing is full of jobs to come."""
    jobs, uid = tmp_path / "jobs", os.getuid()
    for number in (7, *range(1000, 1600)):
        (jobs / str(number)).mkdir(parents=True)
    (jobs / "7" / "roster.0.json").write_text(json.dumps(roster(job_name="squatter")))
    mine = jobs / f"7.{uid}.1"
    mine.mkdir()
    (mine / "roster.0.json").write_text(json.dumps(roster(job_name="mine")))
    if uid == 0:
        os.chown(jobs / "7", 20002, 20002)
        owners = {7: 0, 9: 20001}
        for only in (None, 7):
            assert [r.job_name for r in read_state(tmp_path, owners, only).rosters] == ["mine"]
        os.chown(jobs / "7", 0, 0)
        os.chown(mine, 20002, 20002)
        for only in (None, 7):
            assert [r.job_name for r in read_state(tmp_path, owners, only).rosters] == ["squatter"]
        assert [r.job_name for r in read_state(tmp_path, None, 7).rosters] == ["squatter"], (
            "a directory that names another owner than its own is nobody's"
        )
        os.chown(mine, uid, uid)
    assert [r.job_name for r in read_state(tmp_path, None, 7).rosters] == ["mine"]


def test_older_jobs_that_are_left_out_are_a_problem_in_the_same_words(tmp_path: Path) -> None:
    for job in range(1, 504):
        (tmp_path / "jobs" / str(job)).mkdir(parents=True)
    where = tmp_path / "jobs"
    assert read_state(tmp_path).problems == [f"not read: 3 older jobs in {where}"]
    assert read_jobs(tmp_path, most=502)[1] == [f"not read: 1 older job in {where}"]


def crowd(job: Path, name: str, raw: bytes, count: int) -> None:
    """Make many files of one content."""
    job.mkdir(parents=True, exist_ok=True)
    (job / name.format(0)).write_bytes(raw)
    for number in range(1, count):
        os.link(job / name.format(0), job / name.format(number))


def test_one_users_many_large_rosters_hold_up_nobody(tmp_path: Path) -> None:
    """100 rosters of 4 MB cost every robust-status 200 s and 5 GiB."""
    jobs = tmp_path / "jobs"
    members = b",".join([b'{"name":"a"}'] * 300_000)
    crowd(jobs / "9", "roster.{}.json", b'{"job_id":9,"updated":1,"nodes":[' + members + b"]}", 100)
    crowd(jobs / "9" / "accusations", "n{}.json", b'{"node":"n1","time":1}', 900)
    (jobs / "8").mkdir()
    (jobs / "8" / "roster.0.json").write_text(json.dumps(roster(job_id=8)))
    if os.getuid() == 0:
        os.chown(jobs / "9", 20001, 20001)
    began = time.process_time()
    found = read_state(tmp_path, nodes=50)
    assert time.process_time() - began < 10
    assert all(len(one.nodes) <= 50 for one in found.rosters) and len(found.rosters) < 20
    assert any("of records of one user" in problem for problem in found.problems)
    if os.getuid() == 0:
        assert [one.job_id for one in found.rosters][-1] == 8, "another user's job is read"


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("roster.{}.json", b'{"job_id":9,"updated":1,"nodes":[{"name":"a"}]}'),
        ("roster.{}.json", b'{"job_id":9,"updated":1,"nodes":[{"name":"a","ranks":[%s]}]}'
         % b",".join([b"1"] * 500_000)),
        ("accusations/n{}.json", b'{"node":"n1","time":1,"evidence":"x"}'),
        ("incidents.jsonl", b'{"time":1}\n' * 300_000),
    ],
    ids=["small rosters", "ranks", "reports", "incidents"],
)  # fmt: skip
def test_a_user_has_one_budget_over_all_of_the_users_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, raw: bytes
) -> None:
    """Small files, many jobs, values that become many objects: each counts."""
    monkeypatch.setattr(files, "OWNER_BYTES", 1 << 20)
    first = tmp_path / "jobs" / "1"
    (first / "accusations").mkdir(parents=True)
    crowd(first, name, raw, 90 if "{" in name else 1)
    for job in range(2, 30):
        copied = tmp_path / "jobs" / str(job)
        (copied / "accusations").mkdir(parents=True)
        for path in [*first.glob("*.json*"), *(first / "accusations").iterdir()]:
            os.link(path, copied / path.relative_to(first))
    began = time.process_time()
    read, problems = read_jobs(tmp_path)
    state = read_state(tmp_path)
    assert time.process_time() - began < 5
    assert len(state.rosters) + len(state.reports) < 300
    assert sum(len(one.incidents) for one in read) <= 5000
    assert any("of one user" in line for line in (*problems, *state.problems))


def test_jobs_of_slurm_are_read_before_directories_of_forgotten_ones(tmp_path: Path) -> None:
    """Anybody may make directories of jobs that Slurm has forgotten, newer than a running one."""
    for job in (7, *range(1000, 1600)):
        (tmp_path / "jobs" / str(job)).mkdir(parents=True)
    (tmp_path / "jobs" / "7" / "roster.0.json").write_text(json.dumps(roster(job_id=7)))
    found = read_state(tmp_path, {7: os.getuid(), 1601: 5})
    assert [one.job_id for one in found.rosters] == [7]


def test_finished_jobs_do_not_use_up_what_a_running_one_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer ones of the same user were read first, and their budget was spent."""
    monkeypatch.setattr(files, "OWNER_BYTES", 64 << 10)
    for job in (7, *range(100, 120)):
        (tmp_path / "jobs" / str(job)).mkdir(parents=True)
        record = roster(job_id=job, pad="x" * 8192)
        (tmp_path / "jobs" / str(job) / "roster.0.json").write_text(json.dumps(record))
        (tmp_path / "jobs" / str(job) / "incidents.jsonl").write_text(json.dumps(incident()) + "\n")
    owners = {7: os.getuid(), 120: 5}
    read = [one.job_id for one in read_state(tmp_path, owners).rosters]
    assert read[:2] == [7, 119] and 100 not in read
    jobs = read_jobs(tmp_path, owners)[0]
    assert [one.job_id for one in jobs] == [*range(119, 99, -1), 7], "newest first all the same"
    assert jobs[-1].incidents


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_one_users_directories_hide_no_job_of_another(tmp_path: Path) -> None:
    """Without Slurm's word, 500 directories of jobs to come hid all others, as did a later name."""
    jobs = tmp_path / "jobs"
    for name, owner in (
        ("8", 20001),
        ("8.20002.1", 20002),
        *((str(n), 20002) for n in range(900, 1500)),
    ):
        (jobs / name).mkdir(parents=True)
        (jobs / name / "roster.0.json").write_text(
            json.dumps(roster(job_id=int(name.split(".")[0])))
        )
        os.chown(jobs / name, owner, owner)
    found = read_state(tmp_path)
    assert found.problems == [f"not read: 102 older jobs in {jobs}"]
    assert len(found.rosters) == 500
    uids = {one.uid for one in read_jobs(tmp_path)[0] if one.job_id == 8}
    assert uids == {20001}, "the other one has had its share"
    assert {one.uid for one in read_jobs(tmp_path, {8: 20001})[0]} == {20001}
    every = {8: 20001, 1499: 20002}
    assert {one.job_id for one in read_state(tmp_path, every).rosters} > {8, 1499}
    for only in (None, 8):
        found = read_state(tmp_path, {8: 20001}, only=only)
        assert [one.job_id for one in found.rosters] == [8]


def test_a_mount_that_refuses_others_hides_no_other_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any user may mount a FUSE file system on a directory in ``jobs``: no record was read then."""
    for job in (7, 8):
        (tmp_path / "jobs" / str(job)).mkdir(parents=True)
        (tmp_path / "jobs" / str(job) / "roster.0.json").write_text(json.dumps(roster(job_id=job)))
    real = os.lstat

    def lstat(path: Any, **at: Any) -> os.stat_result:
        if str(path).endswith("/jobs/8"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, **at)

    monkeypatch.setattr(os, "lstat", lstat)
    assert [one.job_id for one in read_state(tmp_path).rosters] == [7]
    assert [one.job_id for one in read_jobs(tmp_path)[0]] == [7]
