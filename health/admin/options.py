"""The options of robust-admin."""

from __future__ import annotations

import argparse
import sys

from health.admin import render
from health.admin.install import ETC
from robust_slurm.command_line.parser import Parser

_EPILOG = """\
exit codes: 0 done, or nothing to do; 1 a machine failed, the answer was no, or (doctor) there is
something to fix; 2 bad input, nothing was changed, or (doctor) Slurm could not be asked; 130 ^C."""


def build_parser() -> Parser:
    parser = Parser(
        prog="robust-admin",
        description="Install the node gate, and check Slurm's configuration.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    etc = Parser(add_help=False)
    etc.add_argument(
        "--etc",
        default=ETC,
        metavar="DIR",
        type=_absolute,
        help=f"directory of the stubs and robust.toml (default: {ETC})",
    )
    change = Parser(add_help=False, parents=[etc])
    change.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    change.add_argument("--dry-run", action="store_true", help="only show what would change")
    change.json_option()
    change.set_defaults(replies={}, needs=[])
    nodes = change.add_argument_group("nodes over SSH (default: this machine)")
    nodes.add_argument(
        "--nodes", metavar="n[1-99]", help="run on these nodes instead of this machine"
    )
    nodes.add_argument("--ssh", action="store_true", help="connect to the nodes by SSH")
    nodes.add_argument("--user", default="root", help="log in as this user (default: root)")
    nodes.add_argument("--port", type=_port, default=22, help="SSH port (default: 22)")
    nodes.add_argument("--identity", default="", metavar="FILE", help="private key for SSH")
    nodes.add_argument(
        "--known-hosts",
        default="",
        metavar="FILE",
        help="host keys (default: ~/.ssh/known_hosts and /etc/ssh/ssh_known_hosts)",
    )
    change.add_argument(
        "--prefix",
        default=sys.prefix,
        metavar="DIR",
        type=_absolute,
        help="where robust-slurm is installed, here and on the nodes (default: the environment of"
        " this robust-admin)",
    )
    change.add_argument(
        "--tmpfiles",
        default=render.TMPFILES,
        metavar="DIR",
        help="directory of systemd's tmpfiles.d (default: %(default)s; empty: write none)",
    )
    change.add_argument(
        "--plugin",
        action="store_true",
        help="the SPANK plugin for srun, sbatch and salloc (--robust) instead of the node gate",
    )
    install = commands.add_parser(
        "install",
        parents=[change],
        help="install the node gate or the plugin",
    )
    install.add_argument(
        "--slurm-include",
        default="",
        metavar="DIR",
        help="directory that holds slurm/spank.h, to compile the plugin (default: Slurm's own)",
    )
    commands.add_parser(
        "uninstall",
        parents=[change],
        help="uninstall the node gate or the plugin",
    )
    doctor = commands.add_parser(
        "doctor", parents=[etc], help="report what is wrong and how to fix it"
    )
    doctor.json_option()
    return parser


def _absolute(text: str) -> str:
    if not text.startswith("/"):
        raise argparse.ArgumentTypeError(f"not an absolute path: {text!r}")
    return text.rstrip("/") or "/"


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"not a port: {text!r}")
    return int(text)
