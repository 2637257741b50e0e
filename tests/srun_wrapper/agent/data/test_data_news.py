"""Reports of a node on its data process: rare, only news, and nothing that is not true."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from srun_wrapper.agent.data import news
from srun_wrapper.agent.data.news import BYTES, SILENT, DataNews, figures
from srun_wrapper.protocol.data_messages import DataReport, encode_report, report_from
from srun_wrapper.protocol.messages import Report, decode_from_agent, encode

WEB = ["web", 1e3, 2.5, 3.0, 0.0, 10, 1]
GOOD = [3, 8, 100, 512, True, [WEB], 0]


def with_source(*row: Any) -> list[Any]:
    return [*GOOD[:5], [list(row)], 0]


HOSTILE = [
    b"", b"\xff\xfe", b"{}", b"null", b"[" * 100_000, b"[" * 5000, b"NaN",
    rb'[3,8,100,512,true,[["\ud800",1,1,1,0,1,1]],0]',
    *(json.dumps(each).encode() for each in (
        [], [-1, *GOOD[1:]], ["3", *GOOD[1:]], [1 << 60, *GOOD[1:]], [*GOOD[:4], 1, [WEB], 0],
        [*GOOD[:5], [WEB] * 22, 0], [*GOOD[:5], {"web": WEB}, 0], [*GOOD[:6], -1],
        with_source("x" * 101, *WEB[1:]), with_source(7, *WEB[1:]), with_source("web"),
        with_source("web", -1.0, *WEB[2:]), with_source("web", 1e300, *WEB[2:]),
        with_source("web", float("nan"), *WEB[2:]), with_source("web", float("inf"), *WEB[2:]),
        with_source("web", None, *WEB[2:]), with_source(*WEB[:5], 1.5, 0),
        with_source(*WEB[:5], 1 << 54, 0),
    )),
]  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_file_that_is_none_of_ours_is_no_figures(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data-1.json"
    path.write_bytes(content)
    assert figures(path) is None


def test_the_file_is_read_as_it_is_and_is_of_now(tmp_path: Path) -> None:
    path = tmp_path / "data-1.json"
    assert figures(path) is None
    path.write_text(json.dumps([*GOOD, "of a newer version"]))
    found = figures(path)
    assert found is not None and found.sources[0].name == "web" and found.ahead == 3
    report = DataReport(2, "", found)
    sent = decode_from_agent(encode(Report(1, (), (), encode_report(report))))
    assert isinstance(sent, Report) and report_from(sent.data) == report
    for age, known in ((SILENT - 5, True), (SILENT + 5, False)):
        os.utime(path, (0, time.time() - age))
        assert (figures(path) is not None) is known
    path.write_text(" " * BYTES + json.dumps(GOOD))
    assert figures(path) is None
    path.unlink()
    path.symlink_to(tmp_path / "other")
    (tmp_path / "other").write_text(json.dumps(GOOD))
    assert figures(path) is None
    path.unlink()
    os.mkfifo(path)
    assert figures(path) is None


def test_news_are_rare_and_new_or_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(news.time, "monotonic", lambda: now)
    known: DataReport | None = None
    told = DataNews(lambda: known)
    assert told.due(0.25) == b""
    known = DataReport(1, "")
    assert told.due(0.25) == b""  # too soon
    now += 2.5
    assert report_from(told.due(0.25)) == known
    heard = 0
    for _ in range(400):
        now += 0.25
        heard += told.due(0.25) != b""
    assert heard == 3, "in 100 s, without a change"
    known = DataReport(2, "it has ended 5 times")
    now += 5.0
    assert report_from(told.due(1.0)) == known
    now += 5.0
    known = DataReport(3)
    assert told.due(1.0) == b""  # a job of a thousand nodes
    now += 5.0
    assert report_from(told.due(1.0)) == known
