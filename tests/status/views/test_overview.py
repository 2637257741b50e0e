"""robust-status fits its screen, and shows first what needs attention."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from status_records import NOW, accusation, roster, view

from robust_slurm.state_dir.records import NodeReport, node_report_from, roster_from
from standby.pool.stock import PoolStock
from status.model import NodeRow, StatusReport, report
from status.views.attention import attention
from status.views.overview import duration, layout, overview
from status.views.watch import CLEAR_BELOW, HOME, watch


def cluster(nodes: int, jobs: int, bad: int, recovering: int = 0) -> StatusReport:
    told = []
    for number in range(jobs):
        state = "recovering" if number < recovering else "running"
        changes: dict[str, Any] = {"job_id": number + 1, "state": state, "job_name": "名前" * 20}
        told.append(roster_from(roster(**changes)))
    made = report([r for r in told if r], [], [], view(), "standby", NOW)
    fine = NodeRow("", ("IDLE",), "", "train", 0, "", None)
    rows = [replace(fine, name=f"gpu{n:04d}") for n in range(nodes)]
    for n in range(bad):
        rows[n] = replace(rows[n], state=("DOWN",), reason="x" * 300)
    return replace(made, nodes=tuple(rows))


@pytest.mark.parametrize("size", [(40, 16), (80, 24), (132, 43), (200, 60)])
@pytest.mark.parametrize(
    ("nodes", "jobs", "bad"), [(4, 0, 0), (1000, 3, 0), (1000, 1, 300), (1000, 300, 300)]
)
def test_it_fits_any_screen(size: tuple[int, int], nodes: int, jobs: int, bad: int) -> None:
    width, height = size
    done = cluster(nodes, jobs, bad)
    lines = overview(done, attention(done, ()), width, height)
    assert len(lines) < height
    assert all(cell_len(line.text) <= width for line in lines)
    text = "\n".join(line.text for line in lines)
    if bad:
        assert lines[0].text == "NEEDS ATTENTION" and "bad" in lines[1].text
        assert "more (" in text
    elif jobs:
        assert lines[0].text.startswith("Nothing needs attention"[: width - 1])
    if jobs > 100:
        assert "more jobs" in text
    full = overview(done, attention(done, ()), 200, None)
    assert sum("bad" in line.text for line in full if line.text.startswith("  gpu")) == bad


def said(**changes: Any) -> NodeReport:
    found = node_report_from(accusation(**changes))
    assert found is not None
    return found


def test_what_needs_attention_and_in_which_order() -> None:
    done = cluster(6, 2, 1, recovering=1)
    pool = PoolStock("standby", 2, 0, 0, 2, 0, 2, 60.0, None)
    done = replace(done, pool=pool)
    reports = [
        said(node="gpu0001", time=NOW - 60, evidence=["ECC"]),
        said(node="gpu0002", withdrawn="it answered again", time=NOW - 30),
        said(node="gpu0003", withdrawn="the same error elsewhere", symptom="crash"),
        said(node="gpu0004", time=NOW - 8 * 86400),
        said(node="gpu0000", time=NOW - 5),
    ]
    look = [(one.kind, one.name) for one in attention(done, reports)]
    assert look == [
        ("recovering", "job 1"),
        ("pool", "standby"),
        ("bad", "gpu0000"),
        ("suspected", "gpu0001"),
        ("flapping", "gpu0002"),
    ]


@pytest.mark.parametrize("problem", ["no records: /x: No such file or directory", "cannot read"])
def test_never_calm_where_something_could_not_be_read(problem: str) -> None:
    calm = cluster(4, 1, 0)
    assert "Nothing needs" in overview(calm, (), 80, 24)[0].text
    for bad in (replace(calm, problems=(problem,)), replace(calm, slurm_error="down")):
        assert not any("Nothing needs" in line.text for line in overview(bad, (), 80, 24))
    assert any(problem in x.text for x in overview(replace(calm, problems=(problem,)), (), 80, 24))


def test_columns_are_left_out_before_any_is_cut() -> None:
    table = [["A", "LONG NAME", "B"], ["1", "x" * 30, "2"]]
    assert layout(table, 50, keep=[0, 2])[0] == "A  LONG NAME" + " " * 23 + "B"
    assert layout(table, 20, keep=[0, 2]) == ["A  B", "1  2"]
    assert [cell_len(line) for line in layout(table, 20, keep=[0, 1, 2])] == [20, 20]
    wide = [["x" * 12, "y" * 12]]
    assert cell_len(layout(wide, 18, keep=[0, 1])[0]) == 18, "the first column is cut as well"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.96, "10.0 s"), (12.4, "12 s"), (60, "1 min 00 s"), (3599.7, "1 h 00 min"),
     (7500, "2 h 05 min"), (172800, "2 d 0 h"), (1e7, "115 d 17 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation


@pytest.mark.parametrize("in_place", [True, False])
def test_watch_repeats_until_interrupted(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm" if in_place else "dumb")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    out = Screen()
    code = watch(lambda to: to.write(f"page {len(waits)}\n") and 1, 5.0, out, wait)
    assert (code, waits) == (1, [5.0] * 3)
    text = out.getvalue()
    assert [f"page {n}" in text for n in range(4)] == [True, True, True, False]
    assert text.count(HOME) == text.count(CLEAR_BELOW) == (3 if in_place else 0)
