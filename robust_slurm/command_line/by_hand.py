"""The programs that slurmd calls, when a person calls them: for help, or with a wrong option.

Prolog, epilog and sweep read their one option themselves and import this module only here, so that
no job waits for argparse.
"""

from __future__ import annotations

from collections.abc import Sequence

from .parser import Parser
from .run import run


def gate_parser(prog: str, description: str) -> Parser:
    """Return the parser of a program that slurmd calls."""
    parser = Parser(prog=prog, description=description)
    add_options(parser)
    return parser


def add_options(parser: Parser) -> None:
    """Add the option that slurmd's programs have."""
    parser.add_argument(
        "--dry-run", action="store_true", help="log what would be done; drain and undrain nothing"
    )


def refuse(parser: Parser, words: Sequence[str]) -> int:
    """Print the help, the version, or what is wrong with the words; return the exit code."""
    return run(parser, words, lambda args, out: 2)
