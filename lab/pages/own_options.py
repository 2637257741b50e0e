"""robust-srun's own options as a parser, for pages and shell completion.

robust-srun itself reads its words with ``srun_options``: most of them are srun's.
"""

from __future__ import annotations

from robust_slurm.command_line.parser import Parser
from robust_slurm.config import FIELDS, flag


def build_parser() -> Parser:
    """Return a parser of the ``--robust-*`` options."""
    parser = Parser(
        prog="robust-srun",
        usage="robust-srun [srun options] [--robust-* options] command ...",
        description="Run a training like srun, and keep it running when hardware fails.",
        add_help=False,
    )
    add = parser.add_argument
    add("--robust-help", action="store_true", help="print all --robust-* options and exit")
    add(
        "--robust-version",
        action="store_true",
        help="print the version and exit (--version: Slurm's as well)",
    )
    add(
        "--robust-explain",
        action="store_true",
        help="print the rules of diagnosis and recovery with the limits in force, and exit",
    )
    add("--robust-config", metavar="FILE", help="read this file instead of ./robust.toml")
    for name, field in FIELDS.items():
        meta = field.metadata
        text = meta["help"].replace("%", "%%")
        if field.type == "bool":
            off = str(meta["off"]).replace("%", "%%")
            add(flag(name), action="store_true", dest=name, help=text)
            add(flag("no_" + name), action="store_false", dest=name, help=off or f"not {name}")
        elif meta["choices"]:
            add(flag(name), choices=meta["choices"], help=text)
        else:
            add(flag(name), metavar=str(field.type).upper(), help=text)
    return parser
