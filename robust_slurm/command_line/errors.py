"""The error of a command: one line for people, or a JSON document for programs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import IO, Any

from robust_slurm.text import one_line

from . import NO
from .progress import line_above

JSON_VERSION = 1
LIMIT = 2000  # characters of a message


class CommandError(Exception):
    """A command cannot do what it was asked; the text says why and, after "; ", what to do.

    ``code``: the exit code. ``usage``: a second line for people, which JSON leaves out.
    """

    def __init__(self, text: str, code: int = NO, usage: str = "") -> None:
        super().__init__(text)
        self.code, self.usage = code, usage


def wants_json(words: Sequence[str]) -> bool:
    """Return whether ``--json`` is among the options, also where they cannot be parsed."""
    words = list(words)
    options = words[: words.index("--")] if "--" in words else words
    return "--json" in options


def as_json(text: str, code: int) -> dict[str, Any]:
    """Return the JSON document of an error: the hint is what follows the first semicolon."""
    message, _, hint = one_line(text, LIMIT).partition("; ")
    error = {"message": message, "hint": hint, "exit_code": code}
    return {"version": JSON_VERSION, "error": error}


def report(prog: str, error: CommandError, json_to: IO[str] | None = None) -> int:
    """Print the error to ``json_to`` as JSON, or to stderr; return its exit code."""
    if json_to is not None:
        json.dump(as_json(str(error), error.code), json_to, indent=1)
        json_to.write("\n")
        json_to.flush()
        return error.code
    warn(prog, str(error))
    if error.usage:
        _print(error.usage)
    return error.code


def warn(prog: str, text: str) -> None:
    """Print one line to stderr, if there is somebody to read it."""
    _print(f"{prog}: {one_line(text, LIMIT)}")


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError), line_above():  # full, or closed
        print(line, file=sys.stderr, flush=True)
