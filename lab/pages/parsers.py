"""The parsers of all commands, as one table; robust-srun's is made from its tables of options."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import NamedTuple

from robust_slurm.config import flag
from robust_slurm.settings import FIELDS
from srun_wrapper.command.srun_table import LONG

# The parsers that a command has besides that of its own name.
_MODULES = {
    "robust-status": ("status.cli",),
    "robust-update": ("srun_wrapper.code.cli",),
    "robust-ckpt": ("robust_slurm.checkpoint.cli",),
    "robust-standby": ("standby.size.cli", "standby.pool.cli"),
    "robust-health": ("health.cli", "health.active.cli", "health.active.burn_in.run"),
    "robust-admin": ("health.admin.cli",),
}
_ABOUT = {
    "robust-standby": "Compute, make and show the pool of standby nodes.",
}
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

    def options(self) -> list[argparse.Action]:
        """Return its arguments and options, without those that no help shows."""
        return [
            action
            for action in self.parser._actions
            if action.help != argparse.SUPPRESS
            and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        ]


def tree(name: str) -> argparse.ArgumentParser:
    """Return one parser for the whole command, each subcommand with its own below it."""
    if name == "robust-srun":
        return srun()
    top, *others = [import_module(module)._parser() for module in _MODULES[name]]
    if name == "robust-standby":
        others = [top, *others]
        top = argparse.ArgumentParser(prog=name, description=_ABOUT[name])
        top.add_subparsers(metavar="COMMAND")
    below = _below(top)
    for parser in others:
        own = _below(parser)
        if own is None:
            _graft(below, parser.prog.split()[-1], parser, parser.description or "")
            continue
        for word, each in own.choices.items():
            _graft(below, word, each, each.description or "")
    parser = top
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def _below(
    parser: argparse.ArgumentParser,
) -> argparse._SubParsersAction[argparse.ArgumentParser] | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action
    return None


def _graft(
    below: argparse._SubParsersAction[argparse.ArgumentParser] | None,
    word: str,
    parser: argparse.ArgumentParser,
    about: str,
) -> None:
    assert below is not None
    if word not in below.choices:
        below.add_parser(word, help=about.partition(". ")[0].rstrip("."), add_help=False)
    below._name_parser_map[word] = parser


def commands(name: str) -> list[Command]:
    """Return the command, or each of its subcommands."""
    top = tree(name)
    below = _below(top)
    if below is None:
        return [Command(name, top, top.description or "")]
    helps = {action.dest: action.help or "" for action in below._choices_actions}
    return [
        Command(f"{name} {word}", parser, _sentence(parser.description or helps.get(word, "")))
        for word, parser in below.choices.items()
    ]


def _sentence(text: str) -> str:
    text = text.strip().replace(" (see its --help)", "")
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


NAMES = ("robust-srun", *_MODULES)


def srun(*, with_srun: bool = False) -> argparse.ArgumentParser:
    """Return robust-srun's options as a parser; ``with_srun``: those of srun too, for completion.

    robust-srun reads its words by ``srun_wrapper/command/srun_options.py``, which is no argparse.
    """
    parser = argparse.ArgumentParser(
        prog="robust-srun", description=SRUN_ABOUT, epilog=SRUN_CODES, add_help=False
    )
    add = parser.add_argument
    for name, f in FIELDS.items():
        meta = f.metadata
        if f.type == "bool":
            word = flag("no_" + name if f.default else name)
            text = meta["off"] if f.default else meta["help"]
            add(word, action="store_true", help=_plain(f"{text} [default: {shown(f.default, '')}]"))
            continue
        choices = meta["choices"] or None
        add(
            flag(name),
            choices=choices,
            metavar=None if choices else str(f.type).upper().replace("STR", "TEXT"),
            help=_plain(f"{meta['help']} [default: {shown(f.default, meta['unit'])}]"),
        )
    add("--robust-config", metavar="FILE", help="read this file instead of ./robust.toml")
    add(
        "--robust-explain",
        action="store_true",
        help="print the rules of diagnosis and recovery with the limits in force, and exit",
    )
    add("--robust-help", action="store_true", help="print all options of robust-srun, and exit")
    if with_srun:
        for name, kind in LONG.items():
            if kind == "none":
                add(f"--{name}", action="store_true", help="see srun")
            else:
                add(f"--{name}", metavar="VALUE", help="see srun")
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the training and its words")
    return parser


def _plain(text: str) -> str:
    return text.replace("%", "%%")  # as argparse reads help texts


def told(action: argparse.Action) -> str:
    """Return an option's help with its default filled in."""
    return argparse.HelpFormatter("")._expand_help(action) if action.help else ""


def shown(default: object, unit: str) -> str:
    """Return a default as a person writes it, with its unit."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int | float):
        return f"{default:g} {unit}".rstrip()
    if isinstance(default, list | tuple):
        return "[" + ", ".join(str(each) for each in default) + "]"
    if isinstance(default, dict) or type(default).__name__ == "Numbers":
        return "none"
    return str(default) or "none"
