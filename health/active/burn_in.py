"""robust-health burn-in: active tests on nodes that no job has, as a Slurm job in a reservation.

For root, or Slurm's own user. Bad nodes are drained while the reservation still keeps jobs away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from health import settings as site
from health.active import aftermath, records, tables
from health.active.fleet import Baselines
from health.active.judge import judge
from health.active.model import LEVELS, TESTS, Judged, Level, usual
from health.active.procedure import Outcome, Wanted, measure
from health.active.profiles import Floors, with_site
from health.active.reservation import refuse_busy, reserved
from health.active.session import Session
from health.active.shares import OVERHEAD_S, rounds
from health.active.start import Started
from health.checks import ALL
from health.commands import BAD_INPUT, BadInput
from health.hostlist import expand
from health.live import context
from health.settings import Settings
from robust_slurm.checkpoint.topology import leaves
from robust_slurm.slurm import Node, Slurm, SlurmError
from robust_slurm.slurm.run import without_slurm

PASSED, FAILED, UNTESTED, INTERRUPTED = 0, 1, 3, 130
START_S = 180.0  # prolog, start of the job, and torch from a slow file system
_SPARE_S = 60.0
SLURM_S = 20.0
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
_EPILOG = """\
exit codes: 0 every node passed, 1 a node is bad, 3 nothing is bad but something could not be
tested or Slurm failed, 2 bad input or busy nodes: nothing was started."""


class Plan(NamedTuple):
    """``gpus``: the nodes by their number of GPUs. ``minutes``: of job and reservation."""

    nodes: tuple[str, ...]
    gpus: dict[int, list[str]]
    partition: str
    python: str
    wanted: Wanted
    minutes: int


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(argv)
    try:
        return _burn_in(options, Slurm(deadline_s=SLURM_S))
    except BadInput as err:
        say(str(err))
        return BAD_INPUT
    except SlurmError as err:
        say(str(err))
        return UNTESTED
    except KeyboardInterrupt:
        say("interrupted; nothing was judged or recorded")
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="robust-health burn-in",
        description="Active tests of nodes that no job has, in a maintenance reservation.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("nodes", metavar="NODES", help='"n[1-8]"')
    add("--level", choices=LEVELS, help="how long each test is (default: [active] burn_in)")
    add("--limit", type=float, metavar="SECONDS", help="for all tests; what does not fit is said")
    add("--partition", metavar="P", help="in which the job runs (default: one with all nodes)")
    add("--time-limit", type=int, metavar="MINUTES", help="of the job and the reservation")
    add("--python", metavar="PATH", help="interpreter with torch (default: [active] python)")
    add("--json", action="store_true", help="findings, verdict and measurements as JSON")
    add("--no-drain", action="store_true", help="leave bad nodes in service")
    add("--keep-reservation", action="store_true", help="do not remove the reservation")
    add("--config", metavar="FILE", help="read this file as the site's settings")
    return parser


def _burn_in(options: argparse.Namespace, slurm: Slurm) -> int:
    settings = _settings(options)
    level = cast(Level, options.level or str(settings.active["burn_in"]))
    try:
        floors = with_site(settings.active["floors"])
    except ValueError as err:
        raise BadInput(str(err)) from None
    plan = _plan(options, settings, level, slurm)
    known, why = records.baselines(settings)
    if why:
        say(f"compared with no record: {why}")
    with reserved(slurm, plan.nodes, plan.minutes, options.keep_reservation, say) as name:
        outcome = asyncio.run(_tested(plan, name, known))
        judged = judge(baselines=known, floors=floors, **outcome._asdict())
        _follow(settings, judged, plan, level, options.no_drain)
    return _show(judged, plan, known, floors, options.json)


def _follow(settings: Settings, judged: Judged, plan: Plan, level: Level, no_drain: bool) -> None:
    """Drain what is bad, and write everything down."""
    data = aftermath.results(judged, plan.nodes, level)
    events = {node: [aftermath.event(data[node])] for node in plan.nodes}
    for node, verdict in aftermath.verdicts(judged, plan.nodes, settings).items():
        if no_drain:
            say(f"{node} {verdict.reason} not drained: --no-drain")
            continue
        outcome, happened = aftermath.drain(settings, node, verdict)
        say(f"{node} {verdict.reason} {outcome}")
        events[node] += happened
    here = context("deep", os.environ).node
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    failed = [
        records.write(settings, judged, level, here, boot),
        aftermath.write(settings, events),
    ]
    for why in filter(None, failed):
        say(f"not fully recorded: {why}")


def _show(judged: Judged, plan: Plan, known: Baselines, floors: Floors, as_json: bool) -> int:
    try:
        if as_json:
            print(tables.as_json(judged), flush=True)
        else:
            tables.show(judged, plan.nodes, known, floors, tables.console(sys.stdout))
    except OSError as err:
        say(f"not printed: {err.strerror}")
    if judged.named:
        return FAILED
    return PASSED if judged.cleared.issuperset(plan.nodes) else UNTESTED


# -- before anything is started ---------------------------------------------------------------


def _settings(options: argparse.Namespace) -> Settings:
    path = options.config or os.environ.get("ROBUST_SITE_CONFIG") or None
    if options.config and not Path(options.config).is_file():
        raise BadInput(f"--config {options.config}: no such file")
    return site.load(path, context("deep", os.environ).node, ALL)


def _plan(options: argparse.Namespace, settings: Settings, level: Level, slurm: Slurm) -> Plan:
    try:
        nodes = tuple(dict.fromkeys(expand(options.nodes)))
    except ValueError as err:
        raise BadInput(f"{options.nodes}: {err}") from None
    limit = full_s(level) if options.limit is None else options.limit
    if not nodes or not 0 < limit < 1e6:
        raise BadInput(f"{options.nodes} --limit {limit:g}: some nodes, and seconds above 0")
    least = math.ceil((START_S + limit + _SPARE_S) / 60)
    minutes = least if options.time_limit is None else options.time_limit
    if minutes * 60 < limit:
        raise BadInput(f"--time-limit {minutes}: the tests may take {limit:g} s, say {least}")
    refuse_busy(slurm, nodes)
    wanted = Wanted(usual(level), level, limit, leaf_of=leaves(slurm.topology()))
    python = options.python or str(settings.active["python"]) or sys.executable
    if not python.startswith("/"):
        raise BadInput(f"--python {python}: an absolute path is needed, as it is on the nodes")
    partition = partition_of(slurm, nodes, options.partition)
    return Plan(nodes, by_gpus(slurm.nodes(nodes).values()), partition, python, wanted, minutes)


def full_s(level: Level) -> float:
    """Seconds in which every test of a level fits, with a fifth to spare."""
    whole = sum(rounds(test.name) * (test.seconds[level] + OVERHEAD_S) for test in TESTS)
    return 10.0 + 1.2 * whole


def by_gpus(nodes: Iterable[Node]) -> dict[int, list[str]]:
    """The nodes by how many GPUs Slurm gives to a job that has them whole. Pure."""
    found: dict[int, list[str]] = {}
    for node in nodes:
        count = sum(int(number) for number in _GPUS.findall(node.gres or ""))
        found.setdefault(count, []).append(node.name)
    return found


def partition_of(slurm: Slurm, nodes: Sequence[str], asked: str | None = None) -> str:
    """A partition that is up and has all the nodes: ``asked``, or the default one. BadInput."""
    known = slurm.partitions()
    if asked is not None and asked not in known:
        raise BadInput(f"--partition {asked}: Slurm knows {', '.join(sorted(known)) or 'none'}")
    partitions = known.values() if asked is None else [known[asked]]
    fit = [p for p in partitions if p.state == "UP" and set(nodes) <= set(p.nodes)]
    if not fit:
        if asked is not None:
            raise BadInput(f"--partition {asked}: is not up, or has not all these nodes")
        raise BadInput("no partition that is up has all these nodes: test them in several runs")
    return max(fit, key=lambda p: p.default).name


# -- the job ------------------------------------------------------------------------------------


async def _tested(plan: Plan, reservation: str, known: Baselines) -> Outcome:
    session = Session(dict.fromkeys(plan.nodes, 1))
    steps: list[Started] = []
    try:
        await session.open()
        # The key goes by the environment: arguments can be read by everybody on the node.
        env = {**without_slurm(os.environ), **session.worker_env("", "")}
        for gpus, nodes in plan.gpus.items():
            step = Started(session, nodes, "srun")
            step.start(job_argv(plan, reservation, gpus, nodes), env, signal.SIGTERM)
            steps.append(step)
        await session.gather(START_S)
        return await measure(
            session,
            plan.nodes,
            plan.wanted,
            reference=known.digests,
            baselines=known,
            said=say,
        )
    except OSError as err:
        raise BadInput(f"the tests cannot be started: {err.filename or ''} {err}") from None
    finally:
        await session.close()
        for step in steps:
            await step.stop()


def job_argv(plan: Plan, reservation: str, gpus: int, nodes: Sequence[str]) -> list[str]:
    """A job of whole nodes, one worker on each."""
    return [
        "srun",
        *(f"--reservation={reservation}", f"--partition={plan.partition}", "--exclusive"),
        *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        *("--nodelist=" + ",".join(nodes), "--mem=0", "--cpu-bind=none", "--chdir=/"),
        *([f"--gres=gpu:{gpus}"] if gpus else []),
        *("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL"),
        *(f"--time={plan.minutes}", f"--job-name={reservation}"),
        *(plan.python, "-P", "-m", "health.active.start"),
    ]


def say(line: str) -> None:
    """To nobody, where the terminal has gone: what is to be cleaned up is."""
    with contextlib.suppress(OSError):
        print(f"robust-health burn-in: {line}", file=sys.stderr)
