"""The data side of a job in robust-status: few lines, and none of what users' records may hold."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from status_records import NOW, roster, view

from robust_slurm.command_line.screen import console
from robust_slurm.state_dir.data_record import MOST, DataRecord, data_from
from robust_slurm.state_dir.progress import JobRun
from robust_slurm.state_dir.records import roster_from
from status.accounts.timeline import JobHistory, account
from status.metrics.families import families
from status.model import job_report, report
from status.render import print_job
from status.report.page import page
from status.show import Cluster
from status.views.attention import attention
from status.views.data import data_lines


def source(name: str, **more: Any) -> dict[str, Any]:
    row = {"tokens_s": 1200.0, "samples_s": 2.0, "waited_s": 0.0, "silent_s": 0.0}
    return {"name": name, **row, "read": 10, "skipped": 0, **more}


def data(**changes: Any) -> dict[str, Any]:
    return {
        "nodes": 3,
        "processes": 3,
        "off_nodes": 0,
        "off": [],
        "deaths": 0,
        "ahead_least": 8,
        "ahead": 8.0,
        "most_ahead": 8,
        "held_bytes": 9,
        "memory_bytes": 99,
        "sources": [source("web")],
        "other_sources": 0,
        "window_s": 60.0,
        "ranks": 6,
        "waiting_ranks": 0,
        "waiting_s": 0.0,
        "waited_ranks": 0,
        "waited_s": 0.0,
        "most_waited": [],
        **changes,
    }


def waited(**changes: Any) -> dict[str, Any]:
    most = [{"rank": 3, "local": 1, "node": "n2", "seconds": 25.0}]
    return data(waited_ranks=6, waited_s=22.4, most_waited=most, **changes)


def made(changes: dict[str, Any]) -> DataRecord:
    found = data_from(changes)
    assert found is not None
    return found


CALM = "data of step 0: 8 of 8 steps ahead; 1.2 k tokens/s"
RANKS = "data waits of step 0: ranks waited 22 of the last 60 s on average, rank 3 on n2 most: 25 s"


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (data(), [CALM]),
        (
            data(
                ahead_least=3,
                ahead=5.3,
                sources=[
                    source(""),
                    *(source(f"s{n}", tokens_s=10.0**n, skipped=n % 2) for n in range(4, 10)),
                ],
            ),
            [
                "data of step 0: 5.3 of 8 steps ahead on average, 3 on the node with fewest; "
                "1.11 G tokens/s (s9 1 G, s8 100 M, s7 10 M, 4 more); "
                "3 bad records skipped (s5 1, s7 1, s9 1)"
            ],
        ),
        (
            waited(sources=[source("web", waited_s=21.0), source("code", waited_s=2.0)]),
            [
                f"{RANKS}; the data process waited 21 s for source web",
                f"{CALM.replace('1.2', '2.4')} (web 1.2 k, code 1.2 k)",
            ],
        ),
        (
            data(waiting_ranks=4, waiting_s=12.3, sources=[source("web", silent_s=12.0)]),
            [
                "data waits of step 0: 4 of 6 ranks now wait for data, the longest for 12 s; "
                "source web has given nothing for 12 s",
                CALM,
            ],
        ),
        (
            waited(),
            [f"{RANKS}; no source is slow: the data process takes long to make steps", CALM],
        ),
        (data(waiting_ranks=6, waiting_s=0.4), [CALM]),
        (waited(nodes=0, processes=0, sources=[]), [RANKS]),  # prepared by the ranks themselves
        (
            data(off_nodes=1, processes=1, deaths=6, off=["n2: it has ended 5 times"]),
            [
                CALM,
                "data processes of step 0: off on 1 of 3 nodes (n2: it has ended 5 times); "
                "no word from 1 of 3 nodes; died 6 times so far",
            ],
        ),
    ],
)
def test_lines(changes: dict[str, Any], lines: list[str]) -> None:
    assert data_lines(made(changes), "0") == lines


def shown(**changes: Any) -> tuple[str, dict[str, Any]]:
    told = roster_from(roster(**changes))
    assert told is not None
    out = io.StringIO()
    done = job_report(7, [told], [], [], view(j7="RUNNING"), NOW)
    print_job(done, console(out))
    return out.getvalue(), vars(done.steps[0])


def test_a_job_shows_its_data_while_it_lives() -> None:
    text, row = shown(data=waited())
    assert RANKS in text and CALM in text and row["data"].most_waited[0].node == "n2"
    assert "data" not in shown()[0] and shown()[1]["data"] is None
    assert "data" not in shown(data=waited(), state="completed")[0]


def test_metrics_and_the_page_of_a_job_have_its_data() -> None:
    skipped = [source("web", skipped=3), source("code", skipped=4)]
    rows = [{**waited(ahead_least=3, sources=skipped, deaths=2), "window_s": 44.8}, data(), None]
    told = [roster_from(roster(job_id=7 + n, data=row)) for n, row in enumerate(rows)]
    live = view(j7="RUNNING", j8="RUNNING", j9="RUNNING")
    done = report([each for each in told if each], [], [], live, "standby", NOW)
    made = {each.name: each.samples for each in families(Cluster(done, (), (), False), [], NOW)}
    name = "robust_slurm_job_data_"
    assert made[name + "wait_ratio"] == {("7", "0"): 0.5, ("8", "0"): 0.0}
    assert made[name + "ahead_steps"] == {("7", "0"): 3, ("8", "0"): 8}
    assert made[name + "skipped_records"] == {("7", "0"): 7, ("8", "0"): 0}
    assert made[name + "process_deaths"] == {("7", "0"): 2, ("8", "0"): 0}
    run = JobRun(NOW - 900, "0", "train", 1, 1, None, NOW, "")
    for number, lines in ((7, 3), (9, 0)):
        (row,) = (each for each in told if each is not None and each.job_id == number)
        of = account(JobHistory(number, "a", "b", 1, True, [run], []), NOW)
        shown = page(of, job_report(number, [row], [], [], live, NOW, ""), [run], False, "1")
        assert len([note for note in shown.notes if note.startswith("data")]) == lines


@pytest.mark.parametrize(
    ("changes", "state", "text"),
    [
        (waited(), "running", "ranks waited 22 of the last 60 s"),
        (data(waiting_ranks=1, waiting_s=31.0), "running", "1 of 6 ranks now wait for data"),
        (data(waiting_ranks=1, waiting_s=29.0), "running", ""),
        (waited(window_s=5.0), "running", ""),
        (waited(window_s=600.0), "running", ""),
        (waited(), "recovering", "recovering"),
        (data(), "running", ""),
    ],
)
def test_a_job_that_waits_for_data_needs_attention(
    changes: dict[str, Any], state: str, text: str
) -> None:
    told = roster_from(roster(data=changes, state=state))
    assert told is not None
    found = attention(report([told], [], [], view(j7="RUNNING"), "standby", NOW), [])
    jobs = [one for one in found if one.name.startswith("job")]
    assert [text in one.text for one in jobs] == ([True] if text else [])
    assert all(one.kind == ("data" if state == "running" else state) for one in jobs)


def test_hostile_records_are_plain_values() -> None:
    names = data()
    wrong: tuple[Any, ...] = (None, [], {}, "x\x1b[31m\n" * 999, -1, 1 << 80, float("nan"), True)
    for value in wrong:
        for key in names:
            data_lines(made({**names, key: value}), "0")
            data_lines(made({**waited(), key: value}), "0")
        for key in source("x"):
            lines = data_lines(made(data(sources=[{**source("web"), key: value}, value])), "0")
            assert all(line.isprintable() for line in lines)
    rows = [{"rank": True, "local": -1, "node": "x" * 999, "seconds": 1e300}] * 999
    found = made(data(most_waited=rows, sources=[source("s" * 999)] * 999, off=["x" * 999] * 999))
    assert {len(found.most_waited), len(found.sources), len(found.off)} == {MOST}
    assert found.most_waited[0].rank is None and found.most_waited[0].seconds == 0.0
    assert data_from([]) is None and len(json.dumps(found, default=vars)) < 200_000
