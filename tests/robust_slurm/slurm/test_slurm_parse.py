"""Recorded and invented scontrol text becomes typed values."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from places import TESTS

from robust_slurm.slurm import job_id_for_cli, parse, values
from robust_slurm.slurm.model import Job, job_from, node_from, partition_from

DATA = TESTS / "data" / "slurm"


def recorded_jobs() -> dict[int, Job]:
    text = (DATA / "22.05-jobs.txt").read_text()
    jobs: dict[int, Job] = {}
    for line in parse.split_records(text, "job"):
        try:
            job = job_from(parse.fields(line, "job"))
        except values.ParseError:  # job 17, whose name holds a newline and an invented job 77
            continue
        jobs[job.id] = job
    return jobs


def test_a_recorded_job_whose_name_and_comment_imitate_fields() -> None:
    job = recorded_jobs()[18]
    assert job.name == "my job=a NodeList=n9 Command=no"
    assert job.comment == "hello = world A=1 NodeList=n9"
    assert (job.user, job.uid, job.state, job.reason) == ("root", 0, "RUNNING", None)
    assert job.nodes == ("n1", "n2")
    assert job.exclude == ("n3", "n4")
    assert job.batch_host == "n1"
    assert job.command is None
    assert job.time_limit_s == 86400 + 2 * 3600 + 4 * 60  # 1-02:03:04, rounded up by Slurm
    assert job.tres_per_node == "gpu:h100:2"
    assert job.min_memory_node_mb == 500
    assert job.min_memory_cpu_mb is None
    assert job.start_time is not None
    assert job.end_time == job.start_time + job.time_limit_s
    assert job.batch
    assert job.requeue
    assert job.restarts == 0


def test_recorded_array_held_and_delayed_jobs() -> None:
    jobs = recorded_jobs()
    rest = jobs[19]
    assert (rest.array_job_id, rest.array_task_id, job_id_for_cli(rest)) == (19, "3-5%2", "19")
    tasks = {job_id_for_cli(j) for j in jobs.values() if j.array_job_id == 19 and j.running}
    assert tasks == {"19_1", "19_2"}
    assert rest.min_memory_cpu_mb == 1024
    held = jobs[20]
    assert (held.state, held.reason, held.nodes) == ("PENDING", "JobHeldUser", ())
    assert held.start_time is None
    assert held.num_nodes == 1
    odd = jobs[21]
    assert odd.name == "two\nlines StdOut=x"
    assert not odd.requeue


def test_recorded_nodes() -> None:
    text = (DATA / "22.05-nodes.txt").read_text()
    nodes = {
        node.name: node
        for node in (node_from(parse.fields(x, "node")) for x in parse.split_records(text, "node"))
    }
    assert set(nodes) == {"n1", "n2", "n3", "n4"}
    drained = nodes["n4"]
    assert drained.state == {"MIXED", "DRAIN"}
    assert drained.reason == "robust: bad GPU 3 = State=UP Comment=x"
    assert drained.reason_time is not None
    assert not drained.usable
    assert drained.partitions == ("standby", "rootonly")
    busy = nodes["n1"]
    assert busy.state == {"MIXED"}
    assert busy.usable
    assert not busy.idle
    assert (busy.gres, busy.cpus, busy.port, busy.reason) == ("gpu:h100:4", 8, 20001, None)
    assert busy.raw["OS"].startswith("Linux ")


def test_a_reason_of_two_lines_keeps_its_first() -> None:
    line = "NodeName=n2 State=MIXED+DRAIN Reason=a [root@1795251695]        b State=x Comment=why"
    node = node_from(parse.fields(line, "node"))
    assert (node.reason, node.reason_time) == ("a", 1795251695.0)
    assert node.comment == "why"


def test_recorded_partitions_and_config() -> None:
    text = (DATA / "22.05-partitions.txt").read_text()
    records = [parse.fields(line, "partition") for line in parse.split_records(text, "partition")]
    found = {p.name: p for p in map(partition_from, records)}
    assert found["train"].nodes == ("n1", "n2", "n3")
    assert found["train"].default
    assert found["train"].max_time_s is None
    assert found["standby"].max_time_s == 86400
    config = parse.settings((DATA / "22.05-config.txt").read_text())
    assert config["SLURM_VERSION"] == "22.05.8"
    assert config["ClusterName"] == "doorlab"


def test_a_name_that_imitates_a_whole_record_is_refused_not_believed() -> None:
    fake = "x UserId=root(0) GroupId=root(0) MCS_label=N/A JobState=RUNNING NodeList=n9"
    line = f"JobId=5 JobName={fake} UserId=eve(7) GroupId=eve(7) MCS_label=N/A JobState=PENDING"
    with pytest.raises(values.ParseError):
        parse.fields(line, "job")
    cut = line.replace(fake, "x\nJobId=5 " + fake).split("\n")[0]
    with pytest.raises(values.ParseError):
        job_from(parse.fields(cut, "job"))


free = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\x85\u2028\u2029"),
    max_size=60,
).map(str.strip)
# Pieces that look like Slurm's own fields, with every kind of neighbour.
hostile = st.lists(
    st.one_of(
        free, st.sampled_from(["JobState=X", "NodeList=n9", "Command=no", "a=b", "UserId=0"])
    ),
    max_size=5,
).map(lambda parts: " ".join(parts).strip())


@pytest.mark.slow
@settings(deadline=None)
@given(name=hostile, comment=hostile)
def test_free_text_never_changes_the_other_fields(name: str, comment: str) -> None:
    assume("Comment=" not in comment)
    line = (
        f"JobId=5 JobName={name} UserId=a(7) GroupId=a(7) MCS_label=N/A JobState=RUNNING "
        f"Reason=None Requeue=1 Restarts=2 NodeList=n[1-2] BatchHost=n1 NumNodes=2 "
        f"Command=/x/run me.sh WorkDir=/w Comment={comment}  StdErr=/e StdIn=/i StdOut=/o Power= "
        f"TresPerNode=gres:gpu:2 "
    )
    job = job_from(parse.fields(line, "job"))
    assert job.name == name
    assert (job.comment or "") == (values.optional(comment) or "")
    assert (job.user, job.uid, job.state, job.restarts) == ("a", 7, "RUNNING", 2)
    assert job.nodes == ("n1", "n2")
    assert job.command == "/x/run me.sh"
    assert job.work_dir == "/w"
    assert job.tres_per_node == "gpu:2"
    assert job.raw["StdOut"] == "/o"


@settings(deadline=None)
@given(st.text(max_size=400))
def test_any_text_parses_or_is_refused(text: str) -> None:
    parse.fields("NodeName=n State=IDLE Reason=" + text, "node")
    try:
        parse.fields("JobId=1 JobName=" + text, "job")
    except values.ParseError:
        assert "UserId" in text
    values.epoch(text)
    values.duration_s(text)
    values.megabytes(text)
    values.state_flags(text)
    values.gres_option(text)
    parse.settings(text)
    try:
        values.expand(text[:40])
    except values.ParseError:
        pass


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("05:30", 330),
        ("7", 420),
        ("2-00", 172800),
        ("365-00:00:00", 31536000),
        ("UNLIMITED", None),
        ("INFINITE", None),
        ("Partition_Limit", None),
        ("NONE", None),
        ("(null)", None),
        ("N/A", None),
        ("INVALID", None),
        ("", None),
        ("-1", None),
    ],
)
def test_durations(text: str, seconds: int | None) -> None:
    assert values.duration_s(text) == seconds


@settings(deadline=None)
@given(st.integers(0, 400 * 86400))
def test_durations_round_trip(seconds: int) -> None:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    assert values.duration_s(f"{days}-{clock}") == seconds


def test_times() -> None:
    assert values.epoch("1795251457") == 1795251457.0
    local = time.mktime((2026, 11, 21, 8, 39, 39, 0, 0, -1))
    assert values.epoch("2026-11-21T08:39:39") == local
    for nothing in ("Unknown", "None", "N/A", "(null)", "", None, "2026-99-99T00:00:00"):
        assert values.epoch(nothing) is None


@pytest.mark.parametrize(
    ("text", "mib"),
    [("500M", 500), ("4G", 4096), ("1.50G", 1536), ("4000", 4000), ("2048K", 2), ("1T", 1048576),
     ("0", None), ("0M", None), ("", None), ("N/A", None), ("(null)", None)],
)  # fmt: skip
def test_memory(text: str, mib: int | None) -> None:
    assert values.megabytes(text) == mib


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("IDLE", {"IDLE"}),
        ("IDLE+NOT_RESPONDING", {"IDLE", "NOT_RESPONDING"}),
        ("MIXED+DRAIN", {"MIXED", "DRAIN"}),
        ("IDLE+CLOUD+POWERED_DOWN", {"IDLE", "CLOUD", "POWERED_DOWN"}),
        ("ALLOCATED+MAINTENANCE+RESERVED", {"ALLOCATED", "MAINTENANCE", "RESERVED"}),
        ("DOWN+INVALID_REG", {"DOWN", "INVALID_REG"}),
        ("", set()),
    ],
)
def test_states_are_sets(text: str, flags: set[str]) -> None:
    assert values.state_flags(text) == flags


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("gres:gpu:h100:4", "gpu:h100:4"),  # 22.05
        ("gres/gpu:h100:4", "gpu:h100:4"),  # 24.11
        ("gres/gpu=4,gres/nic:2", "gpu:4,nic:2"),
        ("license/x:1", None),
        ("(null)", None),
        (None, None),
    ],
)
def test_gres(text: str | None, option: str | None) -> None:
    assert values.gres_option(text) == option


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3]", ("n1", "n2", "n3")),
        ("n10,n[2,5]", ("n10", "n2", "n5")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("a[1-2]b[3-4]", ("a1b3", "a1b4", "a2b3", "a2b4")),
        ("r1-n[2-3],login", ("r1-n2", "r1-n3", "login")),
        ("n1,n1", ("n1",)),
        ("(null)", ()),
        ("None assigned", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_node_lists(text: str | None, names: tuple[str, ...]) -> None:
    assert values.expand(text) == names


def test_folding() -> None:
    assert values.fold(["n3", "n1", "n2", "x"]) == "n[1-3],x"
    assert values.fold([]) == ""
    for bad in ("n1 Partition=x", "n[1-2]", "@all", "n1,n2", "", "n1;n2"):
        with pytest.raises(values.ParseError):
            values.fold([bad])


@pytest.mark.slow
@settings(deadline=None)
@given(st.sets(st.from_regex(r"[a-z]{1,4}-?[0-9]{1,3}([a-z]-?[0-9]{1,2})?", fullmatch=True)))
def test_folding_round_trips_with_one_bracket_per_item(names: set[str]) -> None:
    folded = values.fold(names)
    assert set(values.expand(folded)) == names
    assert all(item.count("[") <= 1 for item in folded.replace("],", "]\n").split("\n"))


def test_records_without_free_text_read_as_those_with_it() -> None:
    """Without free text a record is split in one pass."""
    lines = parse.split_records((DATA / "22.05-nodes.txt").read_text(), "node")
    short = [line for line in lines if not re.search(r" (Reason|Comment|Extra)=", line)]
    assert len(short) > 1
    for line in short:
        assert parse.fields(line + " Comment=x", "node") == {
            **parse.fields(line, "node"),
            "Comment": "x",
        }
    assert parse.fields("NodeName=a State=IDLE State=DOWN", "node")["State"] == "IDLE"


@pytest.mark.parametrize(
    ("state", "running"),
    [
        ("RUNNING", True),
        ("SIGNALING", True),
        ("RUNNING+SIGNALING", True),
        ("COMPLETING", False),
        ("PENDING", False),
        ("PREEMPTED", False),
        ("SUSPENDED", False),
    ],
)
def test_a_job_that_slurm_signals_runs(state: str, running: bool) -> None:
    line = (DATA / "22.05-jobs.txt").read_text().splitlines()[0]
    record = {**parse.fields(line, "job"), "JobState": state}
    assert job_from(record).running is running
