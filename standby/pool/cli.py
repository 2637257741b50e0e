"""``robust-standby apply | show``: the command lines of the pool."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, Any

from msgspec.structs import replace

from health.admin import flow
from robust_slurm.command_line import BAD_INPUT, NO
from robust_slurm.command_line.errors import CommandError
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.run import run
from robust_slurm.config import ConfigError
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.objects import partition_name
from robust_slurm.slurm.values import ParseError, expand
from standby.leases import held
from standby.pool import apply as applying
from standby.pool import edge, settings
from standby.pool import show as showing
from standby.pool.edge import SLURM_S, WishError
from standby.pool.file import PoolError
from standby.pool.members import Wish
from standby.pool.settings import PoolSettings

_CODES = """\
exit codes: 0 done, nothing to do, or (show) all in order; 1 Slurm or a file refused, the answer
was no, or (show) nodes are missing or Slurm differs from what was applied; 2 bad input"""
_RIGHT = (
    "run it as root or SlurmUser or, with slurmdbd, as an administrator of Slurm "
    "(sacctmgr modify user NAME set AdminLevel=Admin)"
)
_MOST_NODES = 20_000
_EXIT_CODES: dict[type[Exception], int] = {
    SlurmError: NO,
    PoolError: NO,
    WishError: BAD_INPUT,
    ConfigError: BAD_INPUT,
    ValueError: BAD_INPUT,
}


def main(argv: Sequence[str], slurm: Slurm | None = None, out: IO[str] | None = None) -> int:
    """Run the subcommand that ``argv`` begins with, and print to ``out`` (stdout)."""
    door = slurm if slurm is not None else Slurm(deadline_s=SLURM_S, ping_first=True)

    def command(args: argparse.Namespace, out: IO[str]) -> int:
        place = settings.pool_settings(args.state_dir, os.environ, os.geteuid())
        try:
            return int(args.run(args, place, door, out))
        except SlurmError as error:
            if error.kind == "denied":
                raise CommandError(f"Slurm refuses: {error.message}; {_RIGHT}") from None
            raise

    return run(
        build_parser(),
        argv,
        command,
        out,
        codes=_EXIT_CODES,
        unread=NO,
        interrupted="interrupted; run it again to do the rest",
    )


# ---- the commands


def _apply(args: argparse.Namespace, place: PoolSettings, slurm: Slurm, out: IO[str]) -> int:
    wanted = partial(wish, args, place.partition)
    if not args.json:
        confirm = None if args.yes else flow.confirm
        return applying.apply(slurm, place.state_dir, wanted, out, confirm, args.dry_run)
    if not (args.yes or args.dry_run):
        raise WishError("--json asks no questions; add --yes or --dry-run")

    def show(report: applying.ApplyReport) -> None:
        json.dump({"version": 1, **report._asdict()}, out, indent=1)
        out.write("\n")

    text = io.StringIO()
    return applying.apply(slurm, place.state_dir, wanted, text, None, args.dry_run, show)


def _show(args: argparse.Namespace, place: PoolSettings, slurm: Slurm, out: IO[str]) -> int:
    record = edge.recorded(place.state_dir)
    sight, told = edge.observe(slurm, record.wish, place.state_dir)
    owners = edge.trainings(slurm, record.wish, sight)
    notes = edge.not_permanent(record, told)
    found = showing.view(record, sight, told, owners, notes)
    if args.json:
        json.dump(showing.as_json(found), out, indent=1)
        out.write("\n")
    else:
        out.write(showing.as_text(found))
    return int(bool(found.stock.short or found.differs))


def wish(args: argparse.Namespace, partition: str, before: Wish | None) -> Wish:
    """Return the wish: options given now override the recorded ones. Raises WishError."""
    given: dict[str, Any] = {
        "partition": args.partition,
        "nodes": args.nodes,
        "size": args.size,
        "source": args.source,
        "backfill": args.backfill,
        "refill": args.refill,
        "proof_hours": args.proof_hours,
        "burn_in_hours": args.burn_in_hours,
        "qos": args.qos,
        "lease": args.lease,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if before is None:
        if "nodes" not in given:
            raise WishError("--nodes is missing: name the nodes of the pool, e.g. --nodes 's[1-8]'")
        before = Wish(partition, (), len(given["nodes"]))
    elif "nodes" in given and "size" not in given and before.size == len(before.nodes):
        given["size"] = len(given["nodes"])  # all of them, as before
    found = replace(before, **given)
    if found.size > len(found.nodes):
        raise WishError(
            f"--size {found.size}: --nodes names only {len(found.nodes)}; name more nodes or a "
            "smaller size"
        )
    names = (found.partition, found.source, found.backfill, found.lease, held(found.lease))
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        raise WishError(
            f"--partition, --from, --backfill and --lease (with its -held) must differ: "
            f"{', '.join(named)}"
        )
    if found.refill == "pool" and not (found.source and found.proof_hours):
        raise WishError(
            "--refill pool also needs --from, the partition of the repaired nodes, and "
            "--proof-hours above 0"
        )
    return found


# ---- options


def build_parser() -> Parser:
    parser = Parser(prog="robust-standby", add_help=False)
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    return parser


def add_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    common = Parser(add_help=False)
    common.add_argument(
        "--state-dir",
        metavar="DIR",
        help="directory of the pool's record (default: state_dir of robust.toml)",
    )
    change = Parser(add_help=False)
    change.add_argument("--dry-run", action="store_true", help="print the changes; make none")
    change.add_argument("--yes", action="store_true", help="do not ask for confirmation")

    def command(name: str, run: Callable[..., int], text: str, *parents: Parser) -> Parser:
        made = commands.add_parser(
            name,
            help=text[0].lower() + text[1:].split(". ")[0].rstrip("."),
            description=text,
            parents=[common, *parents],
            epilog=_CODES,
        )
        made.set_defaults(run=run)
        return made

    one = command(
        "apply",
        _apply,
        "Create the standby pool, or bring it up to date. Options that are not given keep their "
        "last values.",
        change,
    )
    one.add_argument(
        "--nodes", type=_nodes, metavar="s[1-8]", help="nodes that may join, in order of preference"
    )
    one.add_argument(
        "--size",
        type=_count,
        metavar="N",
        help="free standby nodes wanted (default: all of --nodes); 0 gives all nodes back",
    )
    one.add_argument(
        "--partition",
        type=_name,
        metavar="P",
        help="partition of the pool (default: standby_partition of robust.toml)",
    )
    one.add_argument(
        "--from",
        dest="source",
        type=_optional,
        metavar="P",
        help="move nodes out of this partition, and back when the pool does not need them",
    )
    one.add_argument(
        "--backfill",
        type=_optional,
        metavar="P",
        help="low-priority partition over the same nodes; its jobs are preempted when a training "
        "needs a node",
    )
    one.add_argument(
        "--lease",
        type=_optional,
        metavar="P",
        help="partition over the same nodes in which idle ones wait warm for a job, until another "
        "needs them; a second one, P-held, keeps those that got ranks",
    )
    one.add_argument(
        "--refill",
        choices=("train", "pool"),
        help="what happens to repaired nodes of --from: they stay there, or may join the pool "
        "(default: train)",
    )
    one.add_argument(
        "--proof-hours",
        type=_hours,
        metavar="H",
        help="maximum age of the last passed check of a node that joins, in hours; 0: no check is "
        "required (default: 24)",
    )
    one.add_argument(
        "--burn-in-hours",
        type=_hours,
        metavar="H",
        help="maximum age of the last passed `robust-health burn-in` of a node that joins, in "
        "hours; 0: none is required (default: 0)",
    )
    one.add_argument(
        "--qos",
        type=_name,
        metavar="Q",
        help="QOS of the pool's partition, which needs slurmdbd; none removes it",
    )
    two = command("show", _show, "Show the nodes of the pool, their jobs, and what is missing.")
    for each in (one, two):
        each.json_option()


def _nodes(text: str) -> tuple[str, ...]:
    try:
        names = expand(text)
    except ParseError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 < len(names) <= _MOST_NODES:
        raise argparse.ArgumentTypeError(f"not a list of 1 to {_MOST_NODES} nodes: {text[:80]!r}")
    return names


def _name(text: str) -> str:
    try:
        return partition_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _optional(text: str) -> str:
    """A name, or "none" for none."""
    return "" if text in ("", "none") else _name(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise argparse.ArgumentTypeError(f"not a number of nodes: {text[:40]!r}")
    return int(text)


def _hours(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1e6:
        raise argparse.ArgumentTypeError(f"not a number of 0 or more: {text[:40]!r}")
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
