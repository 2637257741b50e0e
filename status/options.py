"""The options of ``robust-status``, and which of them go together."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from robust_slurm.command_line.parser import Parser
from status.suspicions import is_node

WATCH_S = 5.0  # default of --watch
LEAST_WATCH_S = 1.0  # each look asks slurmctld five questions
_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(s|min|h|d|w)", re.ASCII)


def build_parser() -> Parser:
    parser = Parser(
        prog="robust-status",
        description="Show what needs attention, the jobs under robust-srun, and the nodes.",
        epilog="robust-status serve [--help]: the same as a web page and as metrics.",
    )
    parser.add_argument(
        "subject",
        nargs="?",
        type=_subject,
        metavar="JOB|NODE",
        help="show this job with its incidents (all digits), or what is suspected of this node",
    )
    parser.json_option()
    _of_all(parser.add_argument_group("of all jobs and nodes"))
    _of_a_job(parser.add_argument_group("of one job"))
    _accounts(parser.add_argument_group("accounts of time and GPU-hours"))
    _elsewhere(parser.add_argument_group("from elsewhere"))
    # srun's users try -M: accepted here, so that the error is one line that helps.
    parser.add_argument("-M", "--clusters", metavar="NAMES", help=argparse.SUPPRESS)
    return parser


def _of_all(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--nodes", action="store_true", help="show the table of all nodes")
    group.add_argument(
        "--bad", action="store_true", help="show only bad, suspected and flapping nodes"
    )
    group.add_argument("--mine", action="store_true", help="show only your own jobs")
    group.add_argument(
        "--since",
        type=since,
        metavar="TIME",
        help="also show jobs that ended since (30min, 12h, 7d, 2w, 2026-11-26, 2026-11-26T14:00); "
        "with --accounts: count only the time since",
    )
    group.add_argument(
        "--watch",
        nargs="?",
        const=WATCH_S,
        type=_seconds,
        metavar="SECONDS",
        help=f"repeat every SECONDS (default: {WATCH_S:g}) until interrupted",
    )
    group.add_argument(
        "--lemons",
        action="store_true",
        help="show the nodes that jobs excluded, and how many jobs went on without them",
    )
    group.add_argument(
        "--format",
        choices=["exclude"],
        help="with --lemons: print only the nodes to exclude, as a list for sbatch --exclude",
    )
    group.add_argument(
        "--rules",
        action="store_true",
        help="show how often each rule of diagnosis reported a node, and was wrong",
    )
    group.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="write Prometheus metrics to FILE, for node_exporter's textfile collector",
    )


def _of_a_job(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--why", action="store_true", help="describe each restart of the job in a paragraph"
    )
    group.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a report of the job to FILE, one page that needs no other file",
    )


def _accounts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--accounts",
        action="store_true",
        help="show ETTR and the GPU-hours lost by phase, cause, node, user and partition, of all "
        "jobs or of one",
    )
    group.add_argument("--weekly", action="store_true", help="with --accounts: a row per week")
    group.add_argument(
        "--csv",
        action="store_true",
        help="with --accounts: print CSV, a line for each stretch of time (--weekly: each week)",
    )


def _elsewhere(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--state-dir",
        metavar="DIR",
        help="directory of the jobs' records (default: state_dir of robust.toml)",
    )
    group.add_argument(
        "--demo",
        action="store_true",
        help="show a sample cluster of 48 nodes; needs no Slurm and no records (try: job 118)",
    )
    group.add_argument(
        "--diagnose",
        nargs="+",
        type=Path,
        metavar="LOG",
        help="name the first cause of a failure in these logs of one job; needs no Slurm",
    )
    group.add_argument(
        "--signatures",
        type=Path,
        metavar="FILE",
        help="with --diagnose: signatures of the site, tried before the built-in ones "
        "(default: signatures_file of robust.toml)",
    )


def _subject(text: str) -> int | str:
    """A job id, or the name of a node."""
    if not (text.isascii() and text.isdigit()):
        if not is_node(text):
            raise argparse.ArgumentTypeError(f"not a job id or the name of a node: {text!r}")
        return text
    if len(text) > 10 or not 0 < int(text) < 1 << 32:
        raise argparse.ArgumentTypeError(f"not a job id: {text[:40]!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not LEAST_WATCH_S <= value < 1e6:
        least = f"{LEAST_WATCH_S:g}"
        raise argparse.ArgumentTypeError(
            f"not a number of seconds, at least {least}: {text[:40]!r}"
        )
    return value


def since(text: str) -> float:
    """Parse a time before now: seconds ago as a negative number, or seconds since 1970."""
    if (match := _SPAN.fullmatch(text)) is not None:
        return -float(match[1]) * _UNITS[match[2]]
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        pass
    form = "30min, 12h, 7d, 2w, 2026-11-26 or 2026-11-26T14:00"
    raise argparse.ArgumentTypeError(f"not a time: {text[:40]!r}; use the form of {form}")


def contradiction(args: argparse.Namespace) -> str:
    """Return why these options do not go together; "" if they do."""
    if args.clusters is not None:
        return f"-M: shows the cluster of this host only; run it on a host of {args.clusters}"
    views = {
        "--lemons": args.lemons,
        "--rules": args.rules,
        "--diagnose": bool(args.diagnose),
        "--nodes": args.nodes,
        "--bad": args.bad,
        "--why": args.why,
        "--html": args.html is not None,
        "--metrics": args.metrics is not None,
        "--accounts": args.accounts,
    }
    of_a_job = ("--why", "--html", "--accounts")
    named = [name for name, is_given in views.items() if is_given]
    if args.subject is not None and named and named[0] not in of_a_job:
        named.insert(0, "JOB|NODE")
    if len(named) > 1:
        return f"{' and '.join(named)} do not go together; use one of them"
    return _lacks(args, views) or _excludes(args, named)


def _lacks(args: argparse.Namespace, views: Mapping[str, bool]) -> str:
    if args.format and not args.lemons:
        return "--format needs --lemons"
    for name in ("--weekly", "--csv"):
        if getattr(args, name[2:]) and not args.accounts:
            return f"{name} needs --accounts"
    if args.signatures and not args.diagnose:
        return "--signatures needs --diagnose"
    for name in ("--why", "--html"):
        if views[name] and not isinstance(args.subject, int):
            return f"{name} needs a job id"
    if args.accounts and isinstance(args.subject, str):
        return "--accounts is of jobs; give a job id, or none"
    return ""


def _excludes(args: argparse.Namespace, named: Sequence[str]) -> str:
    if args.format and args.json:
        return "--format and --json do not go together"
    if args.csv and args.json:
        return "--csv and --json do not go together"
    if args.demo and (args.state_dir or args.diagnose):
        return "--demo shows records of its own; use it without --state-dir and --diagnose"
    alone = [n for n in named if n not in ("--nodes", "--bad", "--accounts")]
    alone += ["JOB|NODE"] * (args.subject is not None and not named)
    for name, given in (("--mine", args.mine), ("--since", args.since is not None)):
        if given and alone:
            return f"{name} and {alone[0]} do not go together"
    if args.watch is not None:
        once = [*(n for n in ("--html", "--metrics", "--diagnose") if n in named)]
        once += ["--csv"] * args.csv + ["--json"] * args.json
        if once:
            return f"--watch and {once[0]} do not go together"
    return ""
