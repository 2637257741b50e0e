"""robust-health burn-in: active tests on nodes that no job has, as a Slurm job in a reservation.

For root, or Slurm's own user. Bad nodes are drained while the reservation still keeps jobs away.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, cast

from health.active.burn_in import aftermath
from health.active.burn_in.plan import START_S, BurnInPlan, job_argv, planned
from health.active.burn_in.reservation import reserved
from health.active.coordinator import account, runs
from health.active.coordinator.procedure import Measurements, Procedure
from health.active.coordinator.runs import with_tools
from health.active.coordinator.session import About, TestSession
from health.active.coordinator.start import WorkerProcess
from health.active.judging import records, tables
from health.active.judging.fleet import NO_BASELINES, Baselines
from health.active.judging.judge import judge
from health.active.judging.profiles import with_site
from health.active.judging.tables import UNTESTED
from health.active.nvidia import job_tools
from health.active_tests import LEVELS, Judged, Level
from health.commands import BAD_INPUT, BadInput, settings_for
from health.run.live import context
from health.settings import Settings
from robust_slurm import commands
from robust_slurm.command_line.errors import warn
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.plain_text import OutputError
from robust_slurm.command_line.progress import ProgressBar
from robust_slurm.command_line.run import run as command_line
from robust_slurm.command_line.screen import console
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.run import without_slurm

SLURM_S = 20.0
DESCRIPTION = "Run active tests on nodes without jobs, in a maintenance reservation."
EPILOG = """\
exit codes: 0 every node passed, 1 a node is bad, 3 no node is bad but something could not be
tested or Slurm failed, 2 bad input or busy nodes: nothing was started."""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code."""

    def command(options: argparse.Namespace, out: IO[str]) -> int:
        return _burn_in(options, Slurm(deadline_s=SLURM_S), out)

    return command_line(
        build_parser(),
        argv,
        command,
        codes={BadInput: BAD_INPUT, SlurmError: UNTESTED},
        unread=UNTESTED,
        interrupted="interrupted; nothing was judged or recorded",
    )


def build_parser() -> Parser:
    parser = Parser(prog="robust-health burn-in", description=DESCRIPTION, epilog=EPILOG)
    add_options(parser)
    return parser


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add("nodes", metavar="NODES", help='"n[1-8]"')
    add("--level", choices=LEVELS, help="length of each test (default: [active] burn_in)")
    add(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="time limit of all tests; tests that do not fit are listed as skipped",
    )
    add(
        "--partition",
        metavar="P",
        help="partition of the test job (default: one that contains all nodes)",
    )
    add(
        "--time-limit",
        type=int,
        metavar="MINUTES",
        help="time limit of the job and the reservation",
    )
    add(
        "--python",
        metavar="PATH",
        help="interpreter with torch and robust-slurm (default: [active] python, else this one)",
    )
    parser.json_option("print findings, verdict and measurements, or the error, as JSON")
    add("--no-drain", action="store_true", help="do not drain bad nodes")
    add("--keep-reservation", action="store_true", help="do not remove the reservation")
    add("--config", metavar="FILE", help="read the site's settings from this file")


def _burn_in(options: argparse.Namespace, slurm: Slurm, out: IO[str]) -> int:
    settings = settings_for(options.config, context("deep", os.environ).node)
    level = cast(Level, options.level or str(settings.active["burn_in"]))
    try:
        floors = with_site(settings.active["floors"])
    except ValueError as err:
        raise BadInput(str(err)) from None
    plan = planned(options, settings, level, slurm)
    known, why = records.baselines(settings)
    if why:
        say(f"not compared with the fleet's record: {why}")
    with reserved(slurm, plan.nodes, plan.minutes, options.keep_reservation, say) as name:
        ends = time.monotonic() + START_S + plan.wanted.limit
        with ProgressBar("burn-in", START_S + plan.wanted.limit, by_time=True):
            outcome, about = asyncio.run(_tested(plan, name, known))
            outcome = with_tools(outcome, _nvidia(plan, name, about, ends))
        judged = judge(baselines=known, floors=floors, **outcome._asdict())
        _follow(settings, judged, plan, level, options.no_drain)
    try:
        tables.show(judged, plan.nodes, known, floors, console(out), options.json)
    except OutputError as err:  # the reservation and the drains are what matters
        say(f"not printed: {err}")
    return tables.exit_code(judged, plan.nodes)


def _follow(
    settings: Settings, judged: Judged, plan: BurnInPlan, level: Level, no_drain: bool
) -> None:
    """Drain the bad nodes, and record all results."""
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
    failed = [records.write(settings, judged, level, here), aftermath.write(settings, events)]
    for why in filter(None, failed):
        say(f"not fully recorded: {why}")


# -- the job ------------------------------------------------------------------------------------


async def _tested(
    plan: BurnInPlan, reservation: str, known: Baselines
) -> tuple[Measurements, dict[str, About]]:
    session = TestSession(dict.fromkeys(plan.nodes, 1))
    steps: list[WorkerProcess] = []
    try:
        await session.open()
        # The key goes by the environment: arguments can be read by everybody on the node.
        env = {**without_slurm(os.environ), **session.worker_env("", "")}
        env[account.VARIABLE] = plan.user
        for gpus, nodes in plan.gpus.items():
            step = WorkerProcess(session, nodes, "srun")
            words = [plan.python, "-P", *commands.words("health.active.coordinator.start")]
            step.start(job_argv(plan, reservation, gpus, nodes, words), env, signal.SIGTERM)
            steps.append(step)
        await session.gather(START_S)
        outcome = await Procedure(session, plan.nodes, plan.wanted, known, say).measure()
        return outcome, {node: session.about(node) for node in plan.nodes if session.ready(node)}
    except OSError as err:
        raise BadInput(f"the tests cannot be started: {err.filename or ''} {err}") from None
    finally:
        await session.close()
        for step in steps:
            await step.stop()


def _nvidia(
    plan: BurnInPlan, reservation: str, about: Mapping[str, About], ends: float
) -> dict[str, job_tools.ToolResults]:
    """Run NVIDIA's tools on nodes with GPUs, in a job of their own after our workers ended."""
    env, found = without_slurm(os.environ), dict[str, job_tools.ToolResults]()
    for gpus, nodes in plan.gpus.items():
        if not gpus:
            continue
        words = partial(job_argv, plan, reservation, gpus)
        tests = runs.RunPlan(
            tuple(nodes), plan.wanted, job_tools.TOOLS, plan.python, NO_BASELINES, say
        )
        found |= runs.tools_on_step(tests, about, ends - time.monotonic(), words, env)
    return found


say = partial(warn, "robust-health burn-in")
