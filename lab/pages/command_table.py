"""All commands, for what looks at each of them: pages, man pages, shell completion, tests."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from robust_slurm.command_line.parser import Parser

COMMANDS = {
    "robust-srun": "lab.pages.own_options",
    "robust-status": "status.cli",
    "robust-standby": "standby.cli",
    "robust-update": "srun_wrapper.code.cli",
    "robust-ckpt": "robust_slurm.checkpoint.cli",
    "robust-health": "health.cli",
    "robust-prolog": "prolog.cli",
    "robust-epilog": "epilog.cli",
    "robust-admin": "health.admin.cli",
}
"""The module of each command whose ``build_parser()`` returns its parser, sub-commands included.

Import ``robust_slurm.commands`` and call its ``enter()`` first, so that the modules are found.
"""


def parser_of(command: str) -> Parser:
    """Return the parser of a command; nothing else happens."""
    return cast(Parser, import_module(COMMANDS[command]).build_parser())
