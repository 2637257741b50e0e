"""robust-health: check a node, record and replay it, explain a check or an Xid.

Prolog and epilog do not import this module: they call the runner directly. Only the modules of the
chosen subcommand are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from robust_slurm.command_line.parser import Parser

_EPILOG = """\
exit codes: 0 open (or done), 1 closed (or failed), 2 bad input.
settings: /etc/robust-slurm/robust.toml, ROBUST_SITE_CONFIG, or --config FILE."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["sweep"]:  # every few minutes on every node: without argparse
        from health import sweep

        return int(sweep.main(words[1:]))
    if words[:1] == ["test"]:
        from health.active import cli

        return cli.main(words[1:])
    if words[:1] == ["burn-in"]:
        from health.active.burn_in import run as burn_in

        return burn_in.main(words[1:])
    from health import commands
    from robust_slurm.command_line.run import run

    def command(options: argparse.Namespace, out: IO[str]) -> int:
        return int(getattr(commands, options.command)(options))

    codes = {commands.BadInput: commands.BAD_INPUT}
    return run(build_parser(whole=False), words, command, codes=codes)


def build_parser(whole: bool = True) -> Parser:
    """Return the parser; ``whole``: with the options of sub-commands that have their own parser."""
    from robust_slurm.command_line.parser import Parser

    common = Parser(add_help=False)
    common.add_argument("--config", metavar="FILE", help="read the site's settings from this file")
    common.add_argument("--node", metavar="NAME", default="", help="the node's name in Slurm")
    top = Parser(
        prog="robust-health",
        description="Health checks of a Slurm node.",
        epilog=_EPILOG,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser("check", parents=[common], help="run the checks, and drain nothing")
    check.add_argument(
        "--where",
        default="deep",
        help="run the checks of prolog, epilog, sweep or deep (default: deep)",
    )
    check.add_argument("--only", metavar="FAMILY,...", default="", help="run only these families")
    check.json_option("print report and verdict, or the error, as JSON")

    record = commands.add_parser(
        "record",
        parents=[common],
        help="run the checks and record all that they read in a directory",
    )
    record.add_argument(
        "directory", metavar="DIR", help="directory to create; must not exist, or be empty"
    )
    record.add_argument(
        "--where",
        default="deep",
        help="run the checks of prolog, epilog, sweep or deep (default: deep)",
    )
    record.json_option("print report and verdict, or the error, as JSON")

    replay = commands.add_parser("replay", help="run the checks on a recorded directory")
    replay.add_argument("directory", metavar="DIR")
    replay.add_argument("--only", metavar="FAMILY,...", default="", help="run only these families")
    replay.json_option("print report and verdict, or the error, as JSON")

    listing = commands.add_parser("list", help="list all families and what each can find")
    listing.json_option()

    explain = commands.add_parser("explain", help="print the page on a check, a finding or an Xid")
    explain.add_argument(
        "topic", nargs="+", metavar="CHECK|XID", help="for example mounts, ecc-uncorrected or 79"
    )
    explain.json_option()

    repaired = commands.add_parser(
        "repaired",
        parents=[common],
        help="record that the node was repaired, or a GPU reset, by hand",
    )
    repaired.add_argument(
        "--reset",
        metavar="GPU",
        help='record only a reset of this GPU ("gpu3", "3", a PCI address, or "all")',
    )
    repaired.add_argument("--note", default="", help="note of what was done")
    repaired.json_option()

    drains = commands.add_parser(
        "status",
        parents=[common],
        help="show this node's drains of the last 24 h, and what each undrain waits for",
    )
    drains.json_option()

    baseline = commands.add_parser(
        "baseline",
        parents=[common],
        help="record this node's driver, VBIOS and other versions as all nodes' reference",
    )
    baseline.add_argument(
        "--add",
        action="store_true",
        help="add this node's values to the recorded ones instead of replacing them",
    )
    baseline.add_argument(
        "--host",
        action="store_true",
        help="also record memory, NVMe, InfiniBand and Ethernet; only where all nodes are alike",
    )
    baseline.json_option()
    sweep = commands.add_parser("sweep", help="run the HealthCheckProgram: drain and undrain")
    burn_in = commands.add_parser("burn-in", help="run active tests on idle nodes")
    test = commands.add_parser("test", help="run active tests of GPUs, memory and network")
    if whole:
        from health import sweep as sweeping
        from health.active import cli as testing
        from health.active.burn_in import run as burning_in
        from robust_slurm.command_line import by_hand

        sweep.description = sweeping.DESCRIPTION
        by_hand.add_options(sweep)
        sweeping.add_json(sweep)
        for parser, module in ((burn_in, burning_in), (test, testing)):
            parser.description, parser.epilog = module.DESCRIPTION, module.EPILOG
            module.add_options(parser)
    return top


if __name__ == "__main__":
    sys.exit(main())
