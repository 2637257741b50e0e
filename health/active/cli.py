"""robust-health test: active tests, on this machine or on the nodes of the current job."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, cast

from health import node_claim
from health.active.coordinator.procedure import WantedTests
from health.active.coordinator.runs import RunPlan, RunResult, on_job, on_this_machine
from health.active.judging import records, tables
from health.active.judging.fleet import Baselines
from health.active.judging.judge import judge
from health.active.judging.profiles import Floors, with_site
from health.active.judging.tables import PASSED, UNTESTED
from health.active.nvidia import dcgm
from health.active.nvidia.job_tools import TOOLS
from health.active_tests import BY_NAME, LEVELS, Judged, Level
from health.commands import BAD_INPUT, BadInput, settings_for
from health.run.live import context
from health.settings import Settings
from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.plain_text import OutputError
from robust_slurm.command_line.progress import ProgressBar
from robust_slurm.command_line.run import run
from robust_slurm.command_line.screen import console
from robust_slurm.hostlist import expand
from robust_slurm.text import did_you_mean

_RECORD_S = 1.0  # seconds that recording always has: the most by which a run exceeds its limit
DESCRIPTION = "Run active tests on this machine, or on nodes of the current job."
EPILOG = """\
exit codes: 0 all passed, 1 a node is bad, 3 no node is bad but something could not be tested,
2 bad input. The tests use all of a GPU's memory and time: nothing else may run there."""
_MISSING = re.compile("torch cannot be imported|No module named")
# Seconds for all tests without --limit: about twice what the tests declare, and what dcgmi's
# diagnostic takes on 8 GPUs.
_LIMITS: dict[Level, float] = {"quick": 180.0, "standard": 1200.0, "long": 7200.0}


class Claimed(Exception):
    """Another run has the machine; the text says which."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    began = time.monotonic()

    def command(options: argparse.Namespace, out: IO[str]) -> int:
        with _ended_like_by_ctrl_c():
            return _guarded(options, began, out)

    return run(
        build_parser(),
        argv,
        command,
        codes={BadInput: BAD_INPUT},
        unread=UNTESTED,
        interrupted="interrupted; nothing was judged or recorded",
    )


def _guarded(options: argparse.Namespace, began: float, out: IO[str]) -> int:
    try:
        return _test(options, began, out)
    except (BadInput, OutputError):
        raise
    except Exception as err:  # exit code 1 would say that a node is bad
        raise CommandError(f"{type(err).__name__}: {err}; no node was judged", UNTESTED) from err


def build_parser() -> Parser:
    parser = Parser(prog="robust-health test", description=DESCRIPTION, epilog=EPILOG)
    add_options(parser)
    return parser


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add("tests", nargs="*", metavar="TEST", help="run only these tests (see --list)")
    add("--list", action="store_true", help="list the tests with their duration and requirements")
    add("--level", choices=LEVELS, default="quick", help="length of each test (default: quick)")
    add(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="time limit of all tests; tests that do not fit are listed as skipped",
    )
    add(
        "--nodes",
        metavar="NODELIST",
        help='test these nodes of the current job ("n[1-8]"), or "all" of them',
    )
    add(
        "--dcgm-level",
        type=int,
        choices=sorted(dcgm.LEAST_S),
        help="level of dcgmi diag -r (default: 1, 2 or 3 by --level; 4 takes 45 minutes or more)",
    )
    add("--suspect", action="append", default=[], metavar="NODELIST", help="nodes to test first")
    add(
        "--python",
        metavar="PATH",
        help="interpreter with torch and robust-slurm (default: [active] python, else this one)",
    )
    parser.json_option("print findings, verdict and measurements, or the error, as JSON")
    add(
        "--keep", action="store_true", help="write the workers' output to a file and print its path"
    )
    add("--config", metavar="FILE", help="read the site's settings from this file")
    add("--node", metavar="NAME", default="", help="this machine's name in Slurm")
    add("--claimed", action="store_true", help=argparse.SUPPRESS)  # the caller holds the claim


@contextmanager
def _ended_like_by_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, whose handling leaves no process behind."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _test(options: argparse.Namespace, began: float, stream: IO[str]) -> int:
    out = console(stream)
    if options.list:
        if options.json:
            print(tables.listing_json())
        else:
            tables.listing(out)
        return PASSED
    level = cast(Level, options.level)
    here = context("deep", os.environ, options.node).node
    settings = settings_for(options.config, here, strict=not options.claimed)
    nodes = _nodes(options.nodes, here)
    tests = _names(options.tests, options.nodes is not None)
    limit = _LIMITS[level] if options.limit is None else options.limit
    if not 0 < limit < 1e6:
        raise BadInput(f"--limit {limit:g}: seconds, above 0")
    suspects = _suspects(options.suspect, nodes)
    python = _python(options.python or str(settings.active["python"]) or sys.executable)
    try:
        floors = with_site(settings.active["floors"])
    except ValueError as err:
        raise BadInput(str(err)) from None
    known, why = records.baselines(settings, limit / records.PART)
    if why:
        _say(f"not compared with the fleet's record: {why}")
    own = tuple(name for name in tests if name in BY_NAME)
    with _log(options.keep) as log:
        plan = RunPlan(
            nodes,
            WantedTests(own, level, max(1.0, limit - (time.monotonic() - began)), suspects),
            tuple(name for name in TOOLS if name in tests),
            python,
            known,
            (lambda line: None) if options.json else _say,
            log,
            options.dcgm_level,
            str(settings.active["user"]),
        )
        try:
            with ProgressBar("testing", limit, by_time=True):
                if options.nodes is not None:
                    done = on_job(plan)
                else:
                    with _alone(settings, options.claimed):
                        done = on_this_machine(plan)
        except Claimed as err:
            raise CommandError(f"not tested: {err}; wait until it has ended", UNTESTED) from None
        except OSError as err:
            what = f"{err.filename}: " if err.filename else ""
            raise BadInput(f"the tests cannot be started: {what}{err.strerror or err}") from None
    judged = _judged(done, known, floors)
    if any(_MISSING.search(one.error) for one in judged.measured if one.test == "worker"):
        _say(
            f"torch, or robust-slurm itself, cannot be imported by {python}: install "
            "them there or name another interpreter with --python"
        )
    unread = None
    try:  # print the verdict before recording it: the file system may hang
        tables.show(judged, nodes, known, floors, out, options.json)
    except OutputError as err:
        unread = err
    left = min(limit / records.PART, limit - (time.monotonic() - began))
    failed = records.write(settings, judged, level, here, max(_RECORD_S, left))
    if failed:
        _say(f"not fully recorded: {failed}")
    if unread is not None:
        raise unread
    return tables.exit_code(judged, nodes)


@contextmanager
def _alone(settings: Settings, claimed: bool) -> Iterator[None]:
    """Hold the node's claim, as root, so that a prolog that ends active tests ends these too."""
    if claimed or os.geteuid() != 0:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(node_claim.claimed(str(settings.gate["spool"])))
        except BlockingIOError as err:
            busy = err.errno == errno.EBUSY and err.strerror
            raise Claimed(busy or "another test run is active on this machine") from err
        except OSError as err:
            _say(f"a job that starts here cannot stop the tests: {err.filename}: {err.strerror}")
        yield


def _judged(done: RunResult, known: Baselines, floors: Floors) -> Judged:
    """Judge the results; a slow one is an error if another process started using the GPUs."""
    outcome = done.outcome
    judged = judge(baselines=known, floors=floors, **outcome._asdict())
    against = (f for of_node in judged.findings.values() for f in of_node if f.status == "FAIL")
    if not done.disturbed or not any(f.check.endswith("-slow") for f in against):
        return judged
    why = (
        f"measured low while other processes used the GPUs: {'; '.join(done.disturbed)}; free "
        "the GPUs and test again"
    )
    measured = tuple(
        one._replace(values={}, error=one.error or why) if one.values else one
        for one in outcome.measured
    )
    outcome = outcome._replace(measured=measured)
    return judge(baselines=known, floors=floors, **outcome._asdict())


_say = partial(warn, "robust-health test")


def _names(words: Sequence[str], on_job: bool) -> tuple[str, ...]:
    """The tests and tools to run: those named on the command line, else the usual ones."""
    every = [*BY_NAME, *TOOLS]
    for word in words:
        if word not in every:
            near = did_you_mean(word, every, "; see robust-health test --list")
            raise BadInput(f"{word}: no such test{near}")
    if words:
        return tuple(dict.fromkeys(words))
    if on_job:
        return tuple(every)
    return tuple(name for name in every if name in TOOLS or "peer" not in BY_NAME[name].needs)


def _nodes(asked: str | None, here: str) -> tuple[str, ...]:
    if asked is None:
        return (here,)
    job, of_job = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not job or not of_job:
        raise BadInput(
            f"--nodes {asked}: requires a job that owns the nodes (salloc, sbatch); "
            "`robust-health burn-in` starts its own job"
        )
    if shutil.which("srun") is None:
        raise BadInput("--nodes: srun, which starts the workers, is not in PATH")
    theirs = expand(of_job)
    return tuple(theirs) if asked == "all" else _of(asked, "--nodes", theirs, f"job {job}")


def _suspects(lists: Sequence[str], nodes: Sequence[str]) -> tuple[str, ...]:
    found = [name for text in lists for name in _of(text, "--suspect", nodes, "the test")]
    return tuple(dict.fromkeys(found))


def _of(text: str, option: str, known: Sequence[str], whose: str) -> tuple[str, ...]:
    """The nodes of a list, all of them known ones."""
    try:
        names = tuple(dict.fromkeys(expand(text)))
    except ValueError as err:
        raise BadInput(f"{option} {text}: {err}") from None
    strange = [name for name in names if name not in set(known)]
    if strange or not names:
        raise BadInput(
            f"{option} {text}: {', '.join(strange[:8]) or 'nothing'} is not part of {whose}"
        )
    return names


def _python(name: str) -> str:
    """Return the interpreter's absolute path, which must be the same on all nodes of the job."""
    found = shutil.which(name)
    if found is None:
        raise BadInput(f"--python {name}: no such program, or not executable")
    return os.path.abspath(found)  # noqa: PTH100 - a link into a virtual environment must stay one


@contextmanager
def _log(keep: bool) -> Iterator[IO[bytes] | None]:
    """Open the file for the workers' output if ``keep``, and print its path at the end."""
    if not keep:
        yield None
        return
    path = Path(f"robust-test-{os.getpid()}.log").absolute()
    try:
        file = path.open("xb", buffering=0)
    except OSError as err:
        raise BadInput(f"--keep: {path}: {err.strerror}") from None
    with file:
        yield file
    _say(f"the workers' output is in {path}")


if __name__ == "__main__":
    sys.exit(main())
