"""robust-health: look at a node, record and replay it, read what a check or an Xid means.

Nothing here is in the way of a job: prolog and epilog have their own way into the runner. Only
what a subcommand needs is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

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
        from health.active.burn_in import run

        return run.main(words[1:])
    options = _parser().parse_args(words)
    from health import commands

    try:
        return int(getattr(commands, options.command)(options))
    except commands.BadInput as err:
        print(f"robust-health {options.command}: {err}", file=sys.stderr)
        return commands.BAD_INPUT
    except BrokenPipeError:
        sys.stderr.close()  # what read our output has gone; so does the complaint about it
        return commands.OPEN


def _parser() -> argparse.ArgumentParser:
    import argparse

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", metavar="FILE", help="read this file as the site's settings")
    common.add_argument("--node", metavar="NAME", default="", help="the node's name in Slurm")
    top = argparse.ArgumentParser(
        prog="robust-health",
        description="Health checks of a Slurm node.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser("check", parents=[common], help="run the checks; drains nothing")
    check.add_argument(
        "--where", default="deep", help="prolog, epilog, sweep or deep (the default)"
    )
    check.add_argument("--only", metavar="FAMILY,...", default="", help="only these families")
    check.add_argument("--json", action="store_true", help="report and verdict as JSON")

    record = commands.add_parser(
        "record", parents=[common], help="run the checks and keep all they saw in a directory"
    )
    record.add_argument("directory", metavar="DIR", help="must not exist, or be empty")
    record.add_argument("--where", default="deep", help="as for check")

    replay = commands.add_parser("replay", help="run the checks on a recorded directory")
    replay.add_argument("directory", metavar="DIR")
    replay.add_argument("--only", metavar="FAMILY,...", default="", help="only these families")
    replay.add_argument("--json", action="store_true", help="report and verdict as JSON")

    listing = commands.add_parser("list", help="all families and what each can find")
    listing.add_argument("--json", action="store_true")

    explain = commands.add_parser("explain", help="the page on a check, a finding or an Xid")
    explain.add_argument(
        "topic", nargs="+", metavar="CHECK|XID", help="mounts, ecc-uncorrected, 79"
    )

    repaired = commands.add_parser(
        "repaired", parents=[common], help="say that the node was repaired, or a GPU reset, by hand"
    )
    repaired.add_argument(
        "--reset",
        metavar="GPU",
        help='only a reset: of a GPU ("gpu3", "3", its PCI address) or of "all"',
    )
    repaired.add_argument("--note", default="", help="what was done, for the record")

    commands.add_parser(
        "status", parents=[common], help="this node's drains of the last day, and what keeps them"
    )

    baseline = commands.add_parser(
        "baseline", parents=[common], help="record this node's driver, VBIOS, ... as right for all"
    )
    baseline.add_argument(
        "--add", action="store_true", help="allow them beside what is recorded, not in its place"
    )
    baseline.add_argument(
        "--host",
        action="store_true",
        help="also memory, NVMe, InfiniBand and Ethernet: only where all nodes are alike",
    )
    commands.add_parser("sweep", help="the HealthCheckProgram: drain and undrain (see its --help)")
    commands.add_parser("burn-in", help="active tests of idle nodes (see its --help)")
    commands.add_parser("test", help="active tests of GPUs, memory, network (see its --help)")
    return top


if __name__ == "__main__":
    sys.exit(main())
