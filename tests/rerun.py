"""A pytest plugin: a live test that failed runs once more, alone, after all others.

A test is live if it brings up a real Slurm (marked `cluster`) or, seen while it ran, started a
thread or a process or opened a socket: it waits for something that shares this machine's few cores.
So is each test with a fixture that did so, be it for an earlier test.

`make test` loads it (`-p tests.rerun`). A test that passes then is flaky: the run is green, the
test is printed under FLAKY with both outputs and added to tests/flaky.toml, which every run prints.
Pure tests never run again. docs/testing.md has the rules, docs/decisions/0031 the reasons.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import threading
import tomllib
from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

MOST = 5  # known flaky tests; also failures of live tests that can be flakiness
DAYS = 7
ALONE_S = 660.0  # the time limit of a test is 600 s
FILE = Path("tests/flaky.toml")
_BAD = ("failed", "error")
# Python's audit events; the start of a thread is one since 3.12 only.
_LIVE = frozenset({"os.fork", "os.posix_spawn", "socket.__new__", "subprocess.Popen"})


class Known(NamedTuple):
    """A test that is known to be flaky, since a day."""

    id: str
    since: datetime.date


class Twice(NamedTuple):
    """A test that failed, and how its second run ended."""

    id: str
    first: str
    second: str
    passed: bool


# -- the rules (pure) ------------------------------------------------------------------------------


def to_rerun(failed: Sequence[tuple[str, bool]]) -> list[str]:
    """Return the tests that run once more, given (id, is live) of each failure.

    More than MOST failed live tests are a fault, not chance: none runs again.
    """
    ids = list(dict.fromkeys(test for test, live in failed if live))
    return ids if len(ids) <= MOST else []


def parse(text: str) -> list[Known]:
    """Return the entries of flaky.toml. Raises ValueError (tomllib's, or with the entry's name)."""
    found = []
    for entry in tomllib.loads(text).get("test", []):
        name, since = entry.get("id"), entry.get("since")
        if not isinstance(name, str) or type(since) is not datetime.date:
            raise ValueError(f"an entry needs id and since (a date): {entry}")
        found.append(Known(name, since))
    return found


def render(tests: Collection[str], today: datetime.date) -> str:
    """Return the text that adds tests to flaky.toml."""
    return "".join(f"\n[[test]]\nid = {json.dumps(test)}\nsince = {today}\n" for test in tests)


def complaints(known: Sequence[Known], today: datetime.date) -> list[str]:
    """Return why the known flaky tests make the run fail."""
    late = [one for one in known if (today - one.since).days > DAYS]
    found = [f"{one.id} has been flaky since {one.since}: mend it" for one in late]
    if len(known) > MOST:
        found.append(f"{len(known)} tests are known to be flaky, at most {MOST} may be: mend some")
    return found


# -- the plugin ------------------------------------------------------------------------------------


class Rerun:
    """The controller's collection between the tests and the summary of the run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: list[Known] = []
        self.wrong: list[str] = []
        self.twice: list[Twice] = []


_KEY = pytest.StashKey[Rerun]()
_seen: set[str] = set()  # what the running test did that makes it a live one
_live_fixtures: set[str] = set()  # names of fixtures that did so in this process
_start = threading.Thread.start


def _audit(event: str, _args: tuple[Any, ...]) -> None:
    if event in _LIVE:
        _seen.add(event)


def _start_seen(thread: threading.Thread) -> None:
    _seen.add("thread")
    _start(thread)


def pytest_configure(config: pytest.Config) -> None:
    sys.addaudithook(_audit)
    threading.Thread.start = _start_seen  # type: ignore[method-assign]
    if not hasattr(config, "workerinput"):
        config.stash[_KEY] = Rerun(config.rootpath / FILE)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    _seen.clear()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    before = set(_seen)
    _seen.clear()
    try:
        return (yield)
    finally:
        if _seen:
            _live_fixtures.add(fixturedef.argname)
        _seen.update(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    uses = not _live_fixtures.isdisjoint(getattr(item, "fixturenames", ()))
    # Workers send it too.
    report.live = bool(_seen) or uses or item.get_closest_marker("cluster") is not None
    return report


@pytest.hookimpl(trylast=True)  # xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    state = session.config.stash.get(_KEY, None)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if state is None or reporter is None:
        return
    stats = reporter.stats
    if exitstatus == pytest.ExitCode.TESTS_FAILED:
        bad = [report for name in _BAD for report in stats.get(name, [])]
        failed = [(report.nodeid, getattr(report, "live", False)) for report in bad]
        for test in to_rerun(failed):
            mine = [report for report in bad if report.nodeid == test]
            first = "\n".join(_output(report) for report in mine)
            state.twice.append(_alone(session.config, test, first))
            _settle(stats, state.twice[-1], mine)
        if not any(stats.get(name) for name in _BAD):
            session.exitstatus = pytest.ExitCode.OK
    today = datetime.date.today()
    try:
        text = state.file.read_text() if state.file.exists() else ""
        state.known = parse(text)
    except ValueError as error:
        state.wrong = [f"{FILE}: {error}"]
    else:
        flaky = [one.id for one in state.twice if one.passed]
        fresh = [test for test in flaky if test not in {one.id for one in state.known}]
        if fresh:
            with state.file.open("a") as file:
                file.write(render(fresh, today))
        new = [Known(test, today) for test in fresh]
        state.wrong = complaints([*state.known, *new], today)
    if state.wrong and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _output(report: pytest.TestReport) -> str:
    sections = (f"--- {title}\n{text}" for title, text in report.sections)
    return "\n".join([f"--- {report.when}", report.longreprtext, *sections])


def _alone(config: pytest.Config, test: str, first: str) -> Twice:
    argv = [sys.executable, "-m", "pytest", "-q", "-rA", "--no-header", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*argv, test],
            cwd=config.rootpath,
            capture_output=True,
            text=True,
            timeout=ALONE_S,
        )
    except subprocess.TimeoutExpired:
        return Twice(test, first, f"not ended within {ALONE_S:.0f} s", False)
    # One that was skipped ends with 0 as well, and proves nothing.
    passed = done.returncode == 0 and f"\nPASSED {test}\n" in done.stdout
    return Twice(test, first, done.stdout + done.stderr, passed)


def _settle(
    stats: dict[str, list[pytest.TestReport]], one: Twice, reports: list[pytest.TestReport]
) -> None:
    """Count a flaky test as passed, and as flaky; show both runs of one that failed twice."""
    if not one.passed:
        reports[-1].sections.append(("second run, alone", one.second))
        return
    for name in _BAD:
        left = [report for report in stats.get(name, []) if report not in reports]
        if left:
            stats[name] = left
        else:
            stats.pop(name, None)
    passed = stats.setdefault("passed", [])
    if one.id not in {report.nodeid for report in passed}:  # a teardown failed after a good call
        passed.append(reports[0])
    stats.setdefault("flaky", []).append(reports[0])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    state = config.stash.get(_KEY, None)
    if state is None:
        return
    line, title = terminalreporter.write_line, terminalreporter.write_sep
    flaky = [one for one in state.twice if one.passed]
    if flaky:
        title("=", "FLAKY")
        line(f"added to {FILE}: commit it, then mend the test")
    for one in flaky:
        title("_", one.id)
        line(f"{one.first}\n--- the second run, alone, passed\n{one.second}")
    if state.known:
        title("=", "KNOWN TO BE FLAKY")
        for known in state.known:
            line(f"{known.id} since {known.since}")
    for wrong in state.wrong:
        line(f"The run fails: {wrong}", red=True)
