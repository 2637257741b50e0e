"""``robust-standby COMMAND …``: exit 0 (good), 1 (see the command), 2 (bad input).

A command's module is imported only when the command is given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from robust_slurm.command_line import OK
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.run import run

# The module of each command, and how many leading words to drop before its ``main`` is called.
COMMANDS = {
    "size": ("standby.size.cli", 1),
    "apply": ("standby.pool.cli", 0),
    "show": ("standby.pool.cli", 0),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        module, skipped = COMMANDS[words[0]]
        return int(import_module(module).main(words[skipped:]))
    return run(build_parser(), words, lambda args, out: OK)


def build_parser() -> Parser:
    """Return the parser of all commands."""
    from standby.pool import cli as pool
    from standby.size import cli as size

    parser = Parser(
        prog="robust-standby",
        description="Size, create and show the pool of standby nodes.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    size.add_command(commands)
    pool.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
