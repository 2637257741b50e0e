"""The commands and their options, from the table of their parsers."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from lab.pages.command_table import COMMANDS, parser_of
from robust_slurm.settings import FIELDS
from srun_wrapper.command.srun_table import LONG
from status.web import serve

# slurmd calls these, no person does.
BY_SLURM = ("robust-prolog", "robust-epilog")
NAMES = tuple(name for name in COMMANDS if name not in BY_SLURM)
SRUN = "robust-srun"
STATUS = "robust-status"
SRUN_ABOUT = (
    "Run a training in place of srun, and keep it running: detect crashes, hangs and lost nodes, "
    "restart the ranks in place, on spare nodes or on standby nodes, and evict bad nodes. Accepts "
    "every srun option except --multi-prog and heterogeneous steps (:)."
)
SRUN_CODES = (
    "exit codes: the ranks' own as under srun; 2 bad input, nothing was started; 120 gave up "
    "recovering; 121 a node is lost and nothing can replace it; 122 the job was requeued."
)


class Command(NamedTuple):
    """One command and the words behind it that choose what it does (``robust-health check``)."""

    name: str
    parser: argparse.ArgumentParser
    about: str
    epilog: str

    def options(self) -> list[argparse.Action]:
        """Return its arguments and options, without those that are the same everywhere."""
        return [
            action
            for action in self.parser._actions
            if action.help != argparse.SUPPRESS
            and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
            and "--version" not in action.option_strings
            and not _is_default(action)
        ]


def commands(name: str) -> list[Command]:
    """Return the command, or each of its subcommands."""
    top = parser_of(name)
    below = next((a for a in top._actions if isinstance(a, argparse._SubParsersAction)), None)
    if name == SRUN:
        return [Command(name, top, SRUN_ABOUT, SRUN_CODES)]
    if below is None:
        return [Command(name, top, top.description or "", top.epilog or "")]
    helps = {action.dest: action.help or "" for action in below._choices_actions}
    return [
        Command(
            f"{name} {word}",
            parser,
            _sentence(parser.description or helps.get(word, "")),
            parser.epilog or "",
        )
        for word, parser in below.choices.items()
    ]


def documented(name: str) -> list[Command]:
    """Return ``commands(name)`` and ``robust-status serve``, which has a parser of its own."""
    found = commands(name)
    if name == STATUS:
        parser = serve.build_parser()
        found.append(Command(parser.prog, parser, parser.description or "", ""))
    return found


def about(name: str) -> str:
    """Return what the whole command does."""
    return SRUN_ABOUT if name == SRUN else _sentence(parser_of(name).description or "")


def epilog(name: str) -> str:
    """Return what its help says below the options."""
    return SRUN_CODES if name == SRUN else parser_of(name).epilog or ""


def srun_words() -> list[str]:
    """Return srun's own options, as robust-srun takes them; ``=``: with a value."""
    return [f"--{name}{'' if kind == 'none' else '='}" for name, kind in LONG.items()]


def told(action: argparse.Action) -> str:
    """Return an option's help with its default."""
    text = argparse.HelpFormatter("")._expand_help(action) if action.help else ""
    name = _setting(action)
    if name and not isinstance(FIELDS[name].default, bool):
        text += f" [default: {shown(FIELDS[name].default, FIELDS[name].metadata['unit'])}]"
    return text


def shown(default: object, unit: str) -> str:
    """Return a default as a person writes it, with its unit."""
    if isinstance(default, int | float):
        return f"{default:g} {unit}".rstrip()
    return str(default) or "none"


def _is_default(action: argparse.Action) -> bool:
    """Return whether the switch sets what is the default (``--robust-warm``)."""
    name = _setting(action)
    return bool(name) and action.const is not None and action.const == FIELDS[name].default


def _setting(action: argparse.Action) -> str:
    name = action.dest.removeprefix("robust_")
    ours = any(word.startswith("--robust-") for word in action.option_strings)
    return name if ours and name in FIELDS else ""


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
