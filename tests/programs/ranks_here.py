"""Runs a program as ranks on this machine: ``python ranks_here.py WORLD PROGRAM OPTION…``.

What the program imports at its top is imported once, and each rank is a fork after that: importing
torch takes longer than such a training. The first rank that fails ends all.
"""

from __future__ import annotations

import ast
import atexit
import os
import runpy
import signal
import sys
from pathlib import Path


def import_for(program: Path) -> None:
    """What its first statements import, in their order."""
    sys.path[0] = str(program.parent)
    tree = ast.parse(program.read_text())
    tree.body = [each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
    exec(compile(tree, str(program), "exec"), {"__name__": program.stem})


def be_rank(rank: int, world: int, argv: list[str]) -> None:
    """In a fork."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")
    atexit._run_exitfuncs()
    sys.stdout.flush()


def main(world: int, *argv: str) -> int:
    import_for(Path(argv[0]))
    ranks = set()
    for rank in range(world):
        child = os.fork()
        if child == 0:
            be_rank(rank, world, list(argv))
            os._exit(0)  # to take torch apart takes long
        ranks.add(child)
    failed = 0
    while ranks:
        child, status = os.wait()
        ranks.discard(child)
        if status and not failed:
            failed = 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
