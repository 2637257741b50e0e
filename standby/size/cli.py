"""``robust-standby size``: exit 0, 1 (nothing was measured), 2 (usage)."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from robust_slurm.command_line import BAD_INPUT, OK
from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.run import run
from standby.size import answer
from standby.size.count import MAX_NODES, LossSource, SizeError, losses
from standby.size.history import DAY
from standby.size.observed import Observed

JSON_VERSION = 1
_GROUP, _SWITCH = 8, 32  # ByteRobust: a PP group at 9,600 GPUs; its catastrophic case
_HOURS, _QUANTILE = 24.0, 0.99
DESCRIPTION = """\
Compute the number of standby nodes that covers the nodes lost within one refill time, with
probability --quantile. All rates are events per 1,000 node-days: at --rate 1, 1,000 nodes lose one
node a day."""


def main(argv: Sequence[str] | None = None, out: IO[str] | None = None) -> int:
    """Print the answer to ``out`` (stdout) and return the exit code."""
    return run(build_parser(), argv, _size, out, codes={SizeError: BAD_INPUT})


def build_parser() -> Parser:
    parser = Parser(prog="robust-standby size", description=DESCRIPTION)
    add_options(parser)
    return parser


def add_command(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add ``size`` to the parser of robust-standby."""
    text = "compute how many standby nodes are needed"
    add_options(commands.add_parser("size", help=text, description=DESCRIPTION))


def add_options(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--nodes",
        type=_nodes,
        metavar="N",
        help="nodes of the training, not counting standby nodes",
    )
    add("--rate", type=_rate, metavar="R", help="failure rate of single nodes")
    add(
        "--from-ledger", action="store_true",
        help="measure the rates from the state directory: incidents of jobs and drains by the node "
        "gate, divided by the time that the jobs ran",
    )  # fmt: skip
    add("--state-dir", metavar="DIR", help="state directory (default: state_dir of robust.toml)")
    add(
        "--node-days", type=_positive, metavar="D",
        help="with --from-ledger: the observed node-days (default: from the jobs' records); drains "
        "outside of jobs are then counted as well",
    )  # fmt: skip
    add(
        "--since", type=_positive, metavar="DAYS",
        help="with --from-ledger: use the last DAYS days only (default: all records)",
    )  # fmt: skip
    add(
        "--group",
        type=_nodes,
        metavar="NODES",
        help=f"nodes of a parallel group (default: {_GROUP})",
    )
    add("--group-rate", type=_rate, metavar="R", help="eviction rate of whole groups")
    add("--switch", type=_nodes, metavar="NODES", help=f"nodes below a switch (default: {_SWITCH})")
    add("--switch-rate", type=_rate, metavar="R", help="failure rate of switches")
    add(
        "--refill", type=_positive, metavar="HOURS",
        help=f"mean time until a used standby node is replaced, in hours (default: {_HOURS:g})",
    )  # fmt: skip
    add(
        "--quantile",
        type=_quantile,
        metavar="Q",
        help=f"probability that the pool suffices (default: {_QUANTILE})",
    )
    parser.json_option()


def _size(args: argparse.Namespace, out: IO[str]) -> int:
    _check(args)
    found = _answer(args)
    if args.json:
        data = {"version": JSON_VERSION, **as_data(found)}
        json.dump(data, out, indent=1, allow_nan=False)
        out.write("\n")
    else:
        from robust_slurm.command_line.screen import console
        from standby.size.render import print_answer

        print_answer(found, console(out))
    return OK


def _check(args: argparse.Namespace) -> None:
    """Check the options that need or exclude each other. Raises CommandError."""
    given = {name for name, value in vars(args).items() if value is not None and value is not False}
    if args.nodes is None:
        raise _usage("--nodes N is missing: the number of nodes of the training")
    if (args.rate is None) == (not args.from_ledger):
        raise _usage("give either --rate R or --from-ledger")
    if not args.from_ledger and (more := sorted(given & {"state_dir", "node_days", "since"})):
        raise _usage(f"{_flags(more)}: only with --from-ledger")
    for name in ("group", "switch"):
        if vars(args)[name] is not None and vars(args)[f"{name}_rate"] is None:
            raise _usage(f"--{name} needs --{name}-rate, the rate of {name} failures")


def _usage(text: str) -> CommandError:
    return CommandError(text, BAD_INPUT)


def _flags(names: Sequence[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _answer(args: argparse.Namespace) -> answer.PoolSize:
    groups = [
        LossSource(nodes or usual, rate / 1000.0)
        for nodes, usual, rate in (
            (args.group, _GROUP, args.group_rate),
            (args.switch, _SWITCH, args.switch_rate),
        )
        if rate is not None
    ]
    hours, quantile = args.refill or _HOURS, args.quantile or _QUANTILE
    if args.rate is not None:
        sources = [LossSource(1, args.rate / 1000.0), *groups]
        return answer.size_of(args.nodes, sources, hours, quantile)
    losses(args.nodes, groups, hours / 24.0)  # first: an error in these is bad input
    seen = _measure(args)
    sources = seen.sources()
    if groups:
        sources = [*sources[:1], *groups]
    try:
        return answer.size_of(args.nodes, sources, hours, quantile, seen)
    except SizeError as error:
        raise CommandError(f"too few node-days were observed to compute a rate: {error}") from None


def _measure(args: argparse.Namespace) -> Observed:
    from robust_slurm.config import ConfigError, load
    from standby.size.ledger import Ledger

    try:
        named = {"robust-state-dir": args.state_dir} if args.state_dir else {}
        config = load(cli=named, warn=partial(warn, "robust-standby size"))
    except ConfigError as error:
        raise _usage(str(error)) from None
    state_dir: Path = config.state_dir
    if not state_dir.is_dir():
        raise _usage(
            f"{state_dir} is not a directory: name the state directory with --state-dir DIR"
        )
    now = time.time()
    since = now - args.since * DAY if args.since else 0.0
    seen = Ledger(state_dir, now).observed(args.node_days, since)
    if seen.node_days <= 0.0:
        for problem in seen.problems:
            warn("robust-standby size", problem)
        raise CommandError(
            f"no job in {state_dir / 'jobs'} has recorded how long its nodes ran"
            + (" in that time" if since else "")
            + "; give the observed node-days with --node-days D, or a rate with --rate R"
        )
    return seen


def as_data(found: answer.PoolSize) -> dict[str, Any]:
    """The answer for JSON."""
    measured = found.measured
    return {
        **found._asdict(),
        "causes": [cause._asdict() for cause in found.causes],
        "measured": measured._asdict() if measured is not None else None,
    }


# -- numbers ----------------------------------------------------------------------------------


def _nodes(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_NODES):
        raise argparse.ArgumentTypeError(f"not a number of nodes, 1 to {MAX_NODES}: {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"not a number: {text!r}")
    return value


def _rate(text: str) -> float:
    value = _number(text)
    if value < 0.0:
        raise argparse.ArgumentTypeError(f"not a rate, 0 or more per 1,000 node-days: {text!r}")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0.0:
        raise argparse.ArgumentTypeError(f"must be above 0: {text!r}")
    return value


def _quantile(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, like 0.99: {text!r}")
    return value
