"""The site's own checks: commands of [health.site], as root, within a time of their own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, cast

from health.check import Check, Condition, Setting
from health.finding import ActionName, Class, Finding
from health.node.system import System
from health.settings_merge import Commands
from robust_slurm.text import one_line

FAILED = Condition(
    "site-check",
    "FAIL",
    "node",
    "none",
    "a command of [health.site.commands] ended with exit code 1; class and action as set there",
)
UNKNOWN = Condition(
    "site-check-unknown",
    "WARN",
    "tool",
    "none",
    "a command exited with another code, timed out, or users other than root can change what it "
    "runs",
)
SETTINGS = {
    "commands": Setting(
        Commands(),
        "the site's own checks by name, run as root: "
        '[health.site.commands.home] argv = ["/usr/local/sbin/check-home", "-q"]; exit code 0 '
        "passes, 1 fails, any other warns; also deadline, where, class, action",
    ),
    "prolog_deadline": Setting(2.0, "all commands in the prolog; at most 4 s", "s"),
    "deadline": Setting(10.0, "all commands elsewhere; at most 20 s, in the epilog 8 s", "s"),
}
_MOST_S = {"prolog": 4.0, "epilog": 8.0}  # a family that is cut off would close the gate
_TEXT = 200  # characters of a command's own line


def run(system: System) -> list[Finding]:
    options, where = system.options("site"), system.context.where
    commands: Mapping[str, Mapping[str, Any]] = options["commands"]
    wanted = options["prolog_deadline" if where == "prolog" else "deadline"]
    until = time.monotonic() + min(wanted, _MOST_S.get(where, 20.0))
    found = []
    for name, command in commands.items():
        if where == "deep" or where in command["where"]:
            found += _one(system, name, command, until)
    return found


def _one(system: System, name: str, command: Mapping[str, Any], until: float) -> list[Finding]:
    argv = command["argv"]
    left = min(float(command["deadline"]), until - time.monotonic())
    try:
        if left <= 0:
            raise TimeoutError(0, "no time was left for it")
        output = system.command(argv, left)
    except OSError as error:
        named = "" if error.filename in (None, argv[0]) else f"{error.filename} "
        return [UNKNOWN.found(f"{argv[0]}: {named}{error.strerror or error}", name)]
    if output.code == 0:
        return []
    line = first_line(output.out) or first_line(output.err)
    text = f"{argv[0]}: exit code {output.code}" + (f": {line}" if line else "")
    if output.code != 1:
        return [UNKNOWN.found(text, name)]
    cls, action = cast("Class", command["class"]), cast("ActionName", command["action"])
    return [FAILED.found(text, name, cls=cls, action=action)]


def first_line(text: str) -> str:
    """The first line that says something, printable and not too long."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return one_line(line, _TEXT)


CHECK = Check(
    name="site",
    run=run,
    conditions=(FAILED, UNKNOWN),
    settings=SETTINGS,
    closes_on_error=False,
    deadline_s=30.0,
    cost_ms=0.1,
)
