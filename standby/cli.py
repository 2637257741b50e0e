"""``robust-standby COMMAND …``: exit 0 (good), 1 (see the command), 2 (bad input).

A command's module is imported only when the command is given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from robust_slurm.command_line import BAD_INPUT, OK
from robust_slurm.command_line.errors import CommandError, report, wants_json
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.run import run

# The module of each command, and how many leading words to drop before its ``main`` is called.
COMMANDS = {
    "size": ("standby.size.cli", 1),
    "simulate": ("standby.simulate.cli", 1),
    "apply": ("standby.pool.cli", 0),
    "show": ("standby.pool.cli", 0),
}

# Commands of the last release, and what to use instead.
REMOVED = {
    "revert": "run `robust-standby apply --size 0`, which gives the nodes back, then remove the "
    "pool's lines from slurm.conf and run `scontrol reconfigure`",
    "choose": "robust-srun chooses the standby node itself and orders ranks with --robust-place",
    "warm": "run `srun --partition=PARTITION --nodelist=NODE vmtouch -t PATH` on each idle node",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in COMMANDS:
        module, skipped = COMMANDS[words[0]]
        return int(import_module(module).main(words[skipped:]))
    if words and words[0] in REMOVED:
        error = CommandError(f"{words[0]} was removed; {REMOVED[words[0]]}", BAD_INPUT)
        return report("robust-standby", error, sys.stdout if wants_json(words) else None)
    return run(build_parser(), words, lambda args, out: OK)


def build_parser() -> Parser:
    """Return the parser of all commands."""
    from standby.pool import cli as pool
    from standby.simulate import cli as simulate
    from standby.size import cli as size

    parser = Parser(
        prog="robust-standby",
        description="Size, simulate, create and show the pool of standby nodes.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    size.add_command(commands)
    simulate.add_command(commands)
    pool.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
