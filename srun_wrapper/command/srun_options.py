"""Splits ``robust-srun [options] command …`` the way srun's own getopt_long would.

srun's words are kept as typed, so what is not changed is handed on unchanged. The first word
that is no option starts the command; ``--`` ends the options; long options may be abbreviated
while unambiguous; ``-N4``, ``-N 4``, ``-lu`` and ``-K0`` mean what they mean to srun.

An option that is not in the table (another site's SPANK plugin) passes as the one word it is, so
its value must be written ``--option=value``; whether it exists is srun's to judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from robust_slurm.text import did_you_mean
from srun_wrapper.command.srun_table import ALIASES, LONG, SHORT, Arg

PRINTS = frozenset({"robust-help", "robust-version", "robust-explain"})
"""Options that need no command."""


class UsageError(ValueError):
    """The command line cannot be used; the text says which option and what to write instead."""


@dataclass(frozen=True, slots=True)
class Option:
    """One srun option: canonical long ``name``, ``value`` (None: no value), words as typed.

    ``joined``: typed in the same word as the option before it (``-lu``); ``words`` then spell it
    alone and SrunCommand.argv() joins them again.
    """

    name: str
    value: str | None
    words: tuple[str, ...]
    joined: bool = False


@dataclass(frozen=True, slots=True)
class SrunCommand:
    """A command line taken apart.

    ``robust`` has the own options without leading dashes (``robust-spares``), value None for
    switches. ``informational``: srun would print something and exit (``--help``, ``--mpi=list``),
    so the caller should become srun.
    """

    srun: tuple[Option, ...]
    robust: dict[str, str | None]
    command: tuple[str, ...]
    informational: bool = False

    def get(self, name: str) -> Option | None:
        """The option's last occurrence, which is the one srun uses; None if absent."""
        return next((o for o in reversed(self.srun) if o.name == name), None)

    def without(self, names: Iterable[str]) -> SrunCommand:
        """The same command with every occurrence of these options removed."""
        drop = set(names)
        kept: list[Option] = []
        gap = False
        for option in self.srun:
            if option.name in drop:
                gap = True
                continue
            kept.append(replace(option, joined=option.joined and not gap))
            gap = False
        return replace(self, srun=tuple(kept))

    def with_option(self, name: str, value: str | None = None) -> SrunCommand:
        """The same command with this option set, in place of every earlier occurrence."""
        word = f"--{name}" if value is None else f"--{name}={value}"
        rest = self.without([name])
        return replace(rest, srun=(*rest.srun, Option(name, value, (word,))))

    def argv(self) -> list[str]:
        """srun's option words, untouched ones as typed; to be followed by the command."""
        out: list[str] = []
        for option in self.srun:
            if option.joined and out:
                out[-1] += option.words[0][1:]
                out.extend(option.words[1:])
            else:
                out.extend(option.words)
        return out


def split(argv: Sequence[str], robust_flags: Mapping[str, bool]) -> SrunCommand:
    """Take apart the words after ``robust-srun``.

    ``robust_flags``: own option without leading dashes (``robust-spares``) -> takes a value.
    Raises UsageError for an unknown ``--robust-*``, an ambiguous abbreviation, a missing value,
    heterogeneous components or a missing command.
    """
    parser = _Parser(argv, robust_flags)
    while parser.option():
        pass
    command = tuple(argv[parser.at :])
    informational = any(_informs(option) for option in parser.srun)
    if ":" in command:
        raise UsageError(
            "heterogeneous job components are not supported: found ':' after "
            f"{command[0]!r}; start one robust-srun per component, or quote the ':' inside sh -c"
        )
    if not (command or informational or PRINTS.intersection(parser.robust)):
        raise UsageError(
            "no command given: write robust-srun [srun options] [--robust-* options] command …"
        )
    return SrunCommand(tuple(parser.srun), parser.robust, command, informational)


def _informs(option: Option) -> bool:
    if option.name in ("help", "usage", "version", "autocomplete", "test-only"):
        return True
    if option.name == "mpi":
        return option.value == "list"
    return option.name in ("cpu-bind", "mem-bind") and option.value == "help"


class _Parser:
    """Reads one option word (and its value) at a time."""

    def __init__(self, argv: Sequence[str], robust_flags: Mapping[str, bool]) -> None:
        self._argv = argv
        self._robust_flags = robust_flags
        self.at = 0
        self.srun: list[Option] = []
        self.robust: dict[str, str | None] = {}

    def option(self) -> bool:
        """Take the next option; False where the command starts."""
        if self.at >= len(self._argv):
            return False
        word = self._argv[self.at]
        if word == "--":
            self.at += 1
            return False
        if not word.startswith("-") or word == "-":
            return False
        self.at += 1
        if word.startswith("--robust") or _is_plugins(word):
            self._robust(word)
        elif word.startswith("--"):
            self._long(word)
        else:
            self._cluster(word)
        return True

    def _next(self, shown: str) -> str:
        if self.at >= len(self._argv):
            raise UsageError(f"option {shown} needs a value")
        self.at += 1
        return self._argv[self.at - 1]

    def _robust(self, word: str) -> None:
        name, equals, value = word[2:].partition("=")
        if _is_plugins(word):  # the SPANK plugin's option: its value is never the next word
            self.robust["robust-mode"] = value or "full"
            return
        takes = self._robust_flags.get(name)
        if takes is None:
            near = did_you_mean(f"--{name}", [f"--{flag}" for flag in self._robust_flags], ";")
            raise UsageError(f"unknown option --{name}{near} --robust-help lists all")
        if not takes and equals:
            raise UsageError(f"option --{name} takes no value, got {value!r}")
        if takes and not equals:
            value = self._next(f"--{name}")
        self.robust[name] = value if takes else None

    def _long(self, word: str) -> None:
        typed, equals, text = word[2:].partition("=")
        name, arg = _resolve(typed)
        if equals:
            self.srun.append(Option(name, text, (word,)))
        elif arg == "required":
            value = self._next(f"--{typed}")
            self.srun.append(Option(name, value, (word, value)))
        else:
            self.srun.append(Option(name, None, (word,)))

    def _cluster(self, word: str) -> None:
        rest = word[1:]
        joined = False
        while rest:
            letter, rest = rest[0], rest[1:]
            name = SHORT.get(letter)
            if name is None:  # not ours to judge: the whole rest of the word stays as it is
                self.srun.append(Option(letter, None, (f"-{letter}{rest}",), joined))
                return
            arg = LONG[name]
            if arg == "none":
                self.srun.append(Option(name, None, (f"-{letter}",), joined))
                joined = True
                continue
            if arg == "required" and not rest:
                value = self._next(f"-{letter} (--{name})")
                words: tuple[str, ...] = (f"-{letter}", value)
                self.srun.append(Option(name, value, words, joined))
            else:
                self.srun.append(Option(name, rest or None, (f"-{letter}{rest}",), joined))
            return


def _is_plugins(word: str) -> bool:
    """True for ``--robust`` and its abbreviations: passed to srun, they would start us again."""
    name = word[2:].partition("=")[0]
    return name.startswith("ro") and "robust".startswith(name)


def _resolve(typed: str) -> tuple[str, Arg]:
    """Canonical name and argument kind of a long option as typed; unknown ones keep their name."""
    if typed in LONG:
        return ALIASES.get(typed, typed), LONG[typed]
    found = {ALIASES.get(name, name) for name in LONG if typed and name.startswith(typed)}
    if len(found) > 1:
        names = ", ".join(f"--{name}" for name in sorted(found))
        raise UsageError(f"option --{typed} is ambiguous: write one of {names} in full")
    if found:
        name = found.pop()
        return name, LONG[name]
    return typed, "none"
