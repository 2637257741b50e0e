"""``robust-standby simulate``: exit 0, 1 (no mix in the ledger), 2 (usage)."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from robust_slurm.command_line import BAD_INPUT, NO, OK
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.progress import ProgressBar
from robust_slurm.command_line.run import run
from standby.simulate import assumed
from standby.simulate.approaches import APPROACHES, p99_pool
from standby.simulate.events import Approach, Kind, SimulatedCluster
from standby.simulate.ledger import LedgerError, mix
from standby.simulate.mixes import MIXES, scaled
from standby.simulate.study import as_data, study
from standby.size.count import MAX_NODES, SizeError

MOST_FAULTS = 100_000  # of a run
DESCRIPTION = """\
Simulate a training job on many nodes under faults: the share of its time that it trains (ETTR), by
how faults are answered and by the size of the standby pool, and what costs the rest. Nothing was
measured at scale; the output lists what is assumed."""


def main(argv: Sequence[str] | None = None, out: IO[str] | None = None) -> int:
    """Print the answer to ``out`` (stdout) and return the exit code."""
    codes = {LedgerError: NO, SizeError: BAD_INPUT}
    return run(build_parser(), argv, _simulate, out, codes=codes)


def build_parser() -> Parser:
    parser = Parser(prog="robust-standby simulate", description=DESCRIPTION)
    add_options(parser)
    return parser


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``simulate`` to the parser of robust-standby."""
    text = "simulate what faults cost a job"
    add_options(commands.add_parser("simulate", help=text, description=DESCRIPTION))


def _simulate(args: argparse.Namespace, out: IO[str]) -> int:
    if args.since is not None and args.ledger is None:
        raise SizeError("--since: only with --ledger")
    what, kinds = _mix(args)
    pool = p99_pool(kinds, args.nodes, args.refill) if args.pool is None else args.pool
    expected = sum(kind.per_1000 for kind in kinds) / 1000.0 * args.nodes * args.days
    if expected > MOST_FAULTS:
        raise SizeError(f"{expected:,.0f} faults in a run: at most {MOST_FAULTS:,} are simulated")
    cluster = SimulatedCluster(args.nodes, args.days, pool, args.refill, args.step)
    seeds = range(args.seed, args.seed + args.runs)
    with ProgressBar("simulating", 0):
        found = study(cluster, kinds, what, seeds, _approaches(args))
    if args.json:
        json.dump(as_data(found, args.gpus), out, indent=2)
        out.write("\n")
    else:
        from robust_slurm.command_line.screen import console
        from standby.simulate.render import print_study

        print_study(found, args.gpus, console(out))
    return OK


def _approaches(args: argparse.Namespace) -> list[Approach]:
    """Return all approaches, ours with the stall that was given."""
    made = [make(args.nodes, args.step) for make in APPROACHES.values()]
    if args.save is None:
        return made
    given = assumed.assumed("--save", args.save)
    return [one._replace(save=given) if one.name == "ours" else one for one in made]


def _mix(args: argparse.Namespace) -> tuple[str, tuple[Kind, ...]]:
    if args.ledger is None:
        what, kinds = MIXES[args.mix]
    else:
        what, kinds = mix(args.ledger, args.since)
    if args.rate != 1.0:
        what += f", times {args.rate:g}"
    return what, scaled(kinds, args.rate)


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--nodes",
        type=_count(1, MAX_NODES),
        default=1200,
        metavar="N",
        help="nodes of the training, not counting standby nodes (default: %(default)s)",
    )
    add(
        "--gpus",
        type=_count(1, 64),
        default=8,
        metavar="N",
        help="GPUs of a node (default: %(default)s)",
    )
    add(
        "--days",
        type=_above(0.0),
        default=90.0,
        metavar="D",
        help="days that the job runs (default: %(default)g)",
    )
    add(
        "--mix",
        choices=sorted(MIXES),
        default="byterobust",
        help="published mix of faults (default: %(default)s)",
    )
    add(
        "--ledger",
        type=Path,
        metavar="DIR",
        help="use the incidents of this state directory in place of a published mix",
    )
    add(
        "--since",
        type=_above(0.0),
        metavar="DAYS",
        help="with --ledger: use the last DAYS days only (default: all records)",
    )
    add(
        "--rate",
        type=_above(-1e-9),
        default=1.0,
        metavar="X",
        help="multiply all rates by X (default: %(default)g)",
    )
    add(
        "--pool",
        type=_count(0, MAX_NODES),
        metavar="N",
        help="standby nodes (default: as robust-standby size computes for single nodes)",
    )
    add(
        "--refill",
        type=_above(0.0),
        default=assumed.REFILL_H.median,
        metavar="HOURS",
        help="mean time until a used standby node is replaced, in hours (default: %(default)g)",
    )
    add(
        "--step",
        type=_above(0.0),
        default=assumed.STEP.median,
        metavar="SECONDS",
        help="time of a training step, in seconds (default: %(default)g)",
    )
    add(
        "--save",
        type=_above(-1e-9),
        metavar="SECONDS",
        help="time that saving a step stops training, in seconds, for robust-srun (default: "
        f"{assumed.SAVE.median:g}, of 1 GB per rank)",
    )
    add(
        "--runs",
        type=_count(1, 1000),
        default=20,
        metavar="N",
        help="runs with other random numbers (default: %(default)s)",
    )
    add(
        "--seed",
        type=_count(0, 10**9),
        default=0,
        metavar="N",
        help="first seed (default: %(default)s)",
    )
    parser.json_option()


def _count(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        with suppress(ValueError):
            if low <= (value := int(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text[:40]}: it must be from {low} to {high:,}")

    return parse


def _above(low: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        with suppress(ValueError):
            if low < (value := float(text)) < math.inf:
                return value
        least = "above 0" if low == 0 else "0 or more"
        raise argparse.ArgumentTypeError(f"{text[:40]}: it must be {least}")

    return parse
