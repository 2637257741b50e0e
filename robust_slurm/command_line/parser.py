"""The parser of all our commands: argparse, with our messages and suggestions.

Errors are raised as ``CommandError`` and never printed here, so that ``run`` prints all errors of
all commands in the same form.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from robust_slurm.text import did_you_mean, listed

from . import BAD_INPUT, version
from .errors import CommandError

_NUMBER = re.compile(r"-\.?\d")
_REQUIRED = "the following arguments are required: "


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """The sub-commands: one without a description is described by its line in the list."""

    def add_parser(self, name: str, **more: Any) -> Any:
        text = str(more.get("help") or "")
        more.setdefault("description", text[:1].upper() + text[1:] + "." if text else None)
        return super().add_parser(name, **more)


class Parser(argparse.ArgumentParser):
    """A command's options. Every parser has ``--version``; abbreviations are not accepted."""

    def __init__(self, *args: Any, **more: Any) -> None:
        more.setdefault("allow_abbrev", False)
        more.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **more)
        self.register("action", "parsers", _Commands)
        if self.add_help:
            self.add_argument(
                "--version", action=_Version, help="print the version and exit", nargs=0
            )

    def json_option(self, what: str = "print the result, or the error, as JSON") -> None:
        """Add ``--json``."""
        self.add_argument("--json", action="store_true", help=what)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all; CommandError for what is not known, of a sub-command's parser as well."""
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            self.error(f"unexpected: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, in our words."""
        if message.startswith(_REQUIRED):
            message = self._missing(message[len(_REQUIRED) :])
        message = re.sub(r"^argument ", "", message)
        message = message.replace("not allowed with argument ", "does not go together with ")
        message = re.sub(r"expected (at least )?one argument", "needs a value", message)
        message = re.sub(r"ignored explicit argument .*", "takes no value", message)
        message = re.sub(r"^one of the arguments (.+) is required", r"missing: one of \1", message)
        raise CommandError(message, BAD_INPUT, f"Options: {self.prog} --help")

    def _missing(self, names: str) -> str:
        commands = self.commands()
        if commands and names == "COMMAND":
            return f"no command; use {listed(commands)}"
        return f"missing: {names}"

    def commands(self) -> dict[str, argparse.ArgumentParser]:
        """Return the sub-commands' parsers by name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices or {})
        return {}

    def options(self) -> list[str]:
        """Return the options that help shows."""
        shown = (a for a in self._actions if a.help != argparse.SUPPRESS)
        return [name for action in shown for name in action.option_strings]

    def _refuse_unknown(self, words: Iterable[str]) -> None:
        """Name an unknown option before anything else that may be wrong or missing."""
        has_commands = bool(self.commands())
        for word in words:
            if word == "--" or (has_commands and not word.startswith("-")):
                return
            name = word.partition("=")[0]
            if not word.startswith("-") or word == "-" or " " in name or _NUMBER.match(word):
                continue
            known = self._option_string_actions
            if name in known or (name[1] != "-" and name[:2] in known):
                continue
            self.error(f"no such option: {name}{did_you_mean(name, self.options())}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(each) for each in action.choices]
        near = did_you_mean(str(value), choices)
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"no such command: {value}{near or '; use ' + listed(choices)}")
        raise argparse.ArgumentError(action, f"not {str(value)!r}; use {listed(choices)}{near}")


class _Formatter(argparse.HelpFormatter):
    """Wraps descriptions, except those that have lines of their own."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text.strip():
            return super()._fill_text(text, width, indent)
        return "".join(indent + line for line in text.splitlines(keepends=True))


class _Version(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        print(version_text(parser.prog.partition(" ")[0]))
        parser.exit()


def version_text(prog: str) -> str:
    """Return what ``--version`` prints."""
    return f"{prog} (robust-slurm) {version()}"
