"""The way of each command from its words to its exit code."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from . import BAD_INPUT, INTERRUPTED, NO, OK
from .errors import CommandError, report, wants_json
from .parser import Parser
from .plain_text import OutputError, abandon, fit_locale, output

Body = Callable[[argparse.Namespace, IO[str]], int]


def run(
    parser: Parser,
    argv: Sequence[str] | None,
    body: Body,
    out: IO[str] | None = None,
    *,
    codes: Mapping[type[Any], int] | None = None,
    unread: int = OK,
    interrupted: str = "interrupted",
) -> int:
    """Parse ``argv``, call ``body`` with the options and stdout, and return the exit code.

    ``codes``: exceptions whose text is the answer, with the exit code of each. ``unread``: the
    exit code if what reads our output ends first. ``interrupted``: what Ctrl-C leaves behind.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    fit_locale()
    target = output(sys.stdout if out is None else out)
    known = tuple(codes or ())
    prog = _named(parser, words)
    try:
        with contextlib.redirect_stdout(target):
            try:
                code = body(parser.parse_args(words), target)
            except SystemExit as stop:  # --help and --version have printed what they print
                code = stop.code if isinstance(stop.code, int) else BAD_INPUT
            except CommandError as err:
                code = report(prog, err, target if wants_json(words) else None)
            except known as err:
                code = next(c for kind, c in (codes or {}).items() if isinstance(err, kind))
                wrong = CommandError(str(err), code)
                code = report(prog, wrong, target if wants_json(words) else None)
            except KeyboardInterrupt:
                code = report(prog, CommandError(interrupted, INTERRUPTED))
            target.flush()
            return code
    except OutputError as err:
        abandon(target)
        if err.reader_gone:
            return unread
        return report(prog, CommandError(f"the output cannot be written: {err}", NO))


def show(prog: str, text: str) -> int:
    """Print a text of a command that reads its words itself; return the exit code."""
    fit_locale()
    target = output(sys.stdout)
    try:
        print(text, file=target, flush=True)
    except OutputError as err:
        abandon(target)
        if not err.reader_gone:
            return report(prog, CommandError(f"the output cannot be written: {err}", NO))
    return OK


def _named(parser: Parser, words: Sequence[str]) -> str:
    """Return the command's name for messages, with its sub-command: "robust-ckpt verify"."""
    first = next((word for word in words if not word.startswith("-")), "")
    return f"{parser.prog} {first}" if first in parser.commands() else parser.prog
