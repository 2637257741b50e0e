"""``robust-standby COMMAND …``: exit 0 (good), 1 (see the command), 2 (usage).

A command is a function that takes its arguments and returns the exit code, in a module that is
imported only when the command is given.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast


class Command(NamedTuple):
    """``function`` of ``module``, called with the arguments behind the command's name."""

    module: str
    function: str
    help: str


COMMANDS = {
    "size": Command("standby.size.cli", "main", "compute how many standby nodes are needed"),
    "simulate": Command("standby.simulate.cli", "main", "simulate what faults cost a job"),
    "apply": Command("standby.pool.cli", "apply", "create or update the standby pool in Slurm"),
    "show": Command("standby.pool.cli", "show", "show the pool and what is missing"),
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
    if words and words[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command = COMMANDS.get(words[0]) if words else None
    if command is None:
        what = f"no such command: {words[0]!r}" if words else "no command"
        if words and words[0] in REMOVED:
            what = f"{words[0]} was removed: {REMOVED[words[0]]}"
        print(f"{_usage()}\n\nrobust-standby: {what}", file=sys.stderr)
        return 2
    function = getattr(importlib.import_module(command.module), command.function)
    try:
        code = cast(Callable[[list[str]], int], function)(words[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `robust-standby size … | head`
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {entry.help}" for name, entry in COMMANDS.items())
    return f"usage: robust-standby COMMAND …   (robust-standby COMMAND --help)\n\n{rows}"


if __name__ == "__main__":
    sys.exit(main())
