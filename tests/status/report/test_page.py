"""A job's page: what it shows, that it escapes all texts, and how a real browser draws it."""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import subprocess
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from status_records import NOW, incident, roster, view

from robust_slurm.command_line.errors import CommandError
from robust_slurm.state_dir.progress import JobRun, Placing, Point
from robust_slurm.state_dir.records import incident_from, roster_from
from status.accounts.timeline import JobHistory, account
from status.model import job_report
from status.report.charts import Axis, plot, round_values, thinned
from status.report.page import Page, page
from status.report.write import html, replace_text, write_report
from status.source import demo

EVIL = "</style><script>alert(1)</script>\" onload='x' {{7*7}} <img src=//x>"
CHROMIUM = "/usr/bin/chromium"


def made(text: str = "llm", incidents: int = 1, points: int = 50) -> Page:
    """A page of a job whose records hold ``text`` wherever a user or a program can write."""
    told = [
        incident_from(
            incident(
                time=NOW - 800 + 5 * n, suspects=[text], evidence=[text] * 3, symptom=text,
                cause=text, action=text, outcome=text, tests=[text], counters=[text],
                restored=[text], swaps=[["n1", text]], why=text, id=text,
            )
        )
        for n in range(incidents)
    ]  # fmt: skip
    run = JobRun(NOW - 900, "0", text, 4, 8, NOW - 890, NOW, text)
    run.points += [Point(NOW - 890 + n * 10, n, 1.0 + n % 3, 9.0 / (n + 1), 1 + (n > 20))
                   for n in range(points)]  # fmt: skip
    run.placings.append(Placing(NOW - 895, 1, {0: ("n1", "0-1"), 1: (text, text)}))
    run.placings.append(Placing(NOW - 700, 2, {0: (text, "0-1")}))
    kept = tuple(one for one in told if one)
    of = account(JobHistory(7, text, text, 1, False, [run], kept, notes=[text]), NOW)
    steps = [roster_from(roster(job_name=text, user=text, note=text))]
    done = job_report(7, [s for s in steps if s], kept, [text], view(), NOW, text)
    return page(of, done, [run], True, text)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_every_text_is_escaped_and_nothing_is_loaded() -> None:
    plain, evil = Tags(), Tags()
    text = html(made(EVIL))
    plain.feed(html(made("plain")))
    evil.feed(text)
    assert evil.tags == plain.tags and evil.attributes == plain.attributes
    assert not evil.tags & {"script", "img", "iframe", "link", "object", "a"}
    assert "<script>" not in text and "49" not in re.findall(r"onload='x' (\S+)", text)
    assert text.count("alert(1)") > 10  # it is shown, as text
    assert not re.search(r"(?:src|href)\s*=|url\(|@import", text.replace("src=//x", ""))
    assert "default-src &#39;none&#39;" in text or "default-src 'none'" in text


@pytest.mark.parametrize(("incidents", "points"), [(0, 0), (0, 1), (1, 2000), (300, 50)])
def test_pages_of_any_size(incidents: int, points: int) -> None:
    shown = made(incidents=incidents, points=points)
    assert len(shown.told) == min(incidents, 200) + 1  # and what recovers now
    assert shown.left_out == max(0, incidents - 200)
    text = html(shown)
    assert len(text) < 3_000_000
    numbers = [float(n) for n in re.findall(r"(?:x|y|width|height|x1|x2)=\"(-?[\d.]+)\"", text)]
    assert all(-1 <= n <= 1e5 for n in numbers)
    assert "nan" not in text.lower().replace("nan is", "").split("</style>")[1][:200]


def test_a_job_whose_world_is_not_recorded_has_a_page() -> None:
    """The job failed before its first world, or an older robust-srun recorded none."""
    step = roster_from(roster())
    assert step is not None
    failed = JobRun(NOW - 900, "0", "train", 1, 1, None, NOW, "failed")
    for runs in ([], [failed]):
        of = account(JobHistory(7, "a", "b", 1, False, [failed], []), NOW)
        shown = page(of, job_report(7, [step], [], [], view(), NOW, ""), runs, False, "1")
        assert shown.incarnations == () and "Timeline" in html(shown)
        assert "1 GPU," in shown.subtitle


def test_nodes_before_and_after() -> None:
    (first, second) = made("n9").places
    assert (first.before, first.after, first.ranks, first.changed) == ("n1", "n9", "0-1", True)
    assert first.history == "n9 after restart 1"
    assert (second.before, second.after, second.changed) == ("n9", "n9", False)


@pytest.mark.parametrize(
    ("low", "high", "values"),
    [(0.9, 1.0, [0.9, 0.92, 0.94, 0.96, 0.98, 1.0]), (0, 7, [0, 2, 4, 6]),
     (2.0, 30.0, [2, 5, 10, 20]), (3, 3, [3])],
)  # fmt: skip
def test_round_values(low: float, high: float, values: list[float]) -> None:
    assert round_values(low, high) == pytest.approx(values)


def test_charts_of_odd_values() -> None:
    axis = Axis(NOW, NOW + 10)
    assert plot("x", "", axis, [("a", "b", [])], []) is None
    same = plot("x", "", axis, [("a", "b", [[(NOW, 0.0), (NOW + 5, 0.0)]])], [])
    assert same is not None and len(same.curves[0].parts) == 1
    assert len(axis.ticks()) > 2 and len(Axis(NOW, NOW).ticks()) >= 1
    points = [(float(n), float(n)) for n in range(1234)]
    thin = thinned(points, 100)
    assert len(thin) == 100 and sum(v for _, v in thin) / 100 == pytest.approx(616.5, rel=0.01)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with demo(NOW) as source:
        with pytest.raises(CommandError, match="cannot write"):
            write_report(118, tmp_path / "no" / "x.html", source, io.StringIO())
        with pytest.raises(CommandError, match="cannot write /: "):
            write_report(118, Path("/"), source, io.StringIO())
        with pytest.raises(CommandError, match="no record of job 7"):
            write_report(7, tmp_path / "x.html", source, io.StringIO())
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_written_to_and_never_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Root would replace the machine's /dev/null. A link elsewhere may be an attacker's."""
    replace_text(Path(f"/proc/{os.getpid()}/fd/1"), "text")
    assert capfd.readouterr().out == "text"
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert (tmp_path / "link").read_text() == "new"


def looked_at(picture: Path) -> tuple[int, int, int, tuple[int, ...]]:
    """Width, height, number of different lines, and first pixel of a PNG (8 bits)."""
    raw = picture.read_bytes()
    width, height, _, kind = struct.unpack(">IIBB", raw[16:26])
    data, at = b"", 8
    while at < len(raw):
        (size,) = struct.unpack(">I", raw[at : at + 4])
        if raw[at + 4 : at + 8] == b"IDAT":
            data += raw[at + 8 : at + 8 + size]
        at += size + 12
    lines, step = zlib.decompress(data), {2: 3, 6: 4}[kind]
    row = width * step + 1
    first = tuple(lines[1 : 1 + step])
    return width, height, len({lines[n * row : (n + 1) * row] for n in range(height)}), first


@pytest.mark.skipif(not shutil.which(CHROMIUM), reason=f"no {CHROMIUM}: no picture is taken")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (480, True)])
def test_a_browser_draws_it(tmp_path: Path, width: int, dark: bool) -> None:
    with demo(NOW) as source:
        assert write_report(118, tmp_path / "r.html", source, io.StringIO()) == 0
    argv: list[Any] = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars",
        f"--window-size={width},1600", f"--screenshot={tmp_path / 'r.png'}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"file://{tmp_path}/r.html",
    ]  # fmt: skip
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=env)
    assert (tmp_path / "r.png").is_file(), done.stderr[-2000:]
    wide, high, rows, first = looked_at(tmp_path / "r.png")
    assert (wide, high) == (width, 1600)
    assert rows > 100  # not an empty page
    assert (sum(first[:3]) < 150) is dark
