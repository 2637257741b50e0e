"""The controller hooks for a site: the script that slurmctld runs, and the lines of slurm.conf."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from health.admin import render
from health.admin.install import Directory, WantedFile
from health.admin.show_config import release, scripts_of, value_of
from health.gate.gate import UNLOADED

HOOK = "hook"
KEYS = ("EpilogSlurmctld", "PrologSlurmctld")
SEVERAL = (24, 5)  # the first release that runs more than one script of a kind
WHY = {
    "EpilogSlurmctld": "starts requeued robust jobs at once, and refills the standby pool",
    "PrologSlurmctld": (
        "refills the standby pool when a standby node is used, and makes the jobs' directories "
        "where users cannot; leave it out where neither is wanted"
    ),
}


class HookLine(NamedTuple):
    """A line that the site's files lack, and the file that it goes to."""

    key: str
    where: str
    line: str


def directory(etc: str) -> str:
    """Return the hooks' own directory: its manifest is not the gate's."""
    return f"{etc}/controller"


def path(etc: str) -> str:
    return f"{directory(etc)}/{HOOK}"


def directories(etc: str) -> list[Directory]:
    return [Directory(etc, 0o755), Directory(directory(etc), 0o755)]


def files(etc: str, prefix: render.Prefix, config: Mapping[str, str]) -> list[WantedFile]:
    """Return the files to install. ``config``: ``scontrol show config``; may be empty."""
    what = "Slurm's PrologSlurmctld and EpilogSlurmctld"
    known = {
        "load_s": render.LOAD_S,
        "unloaded": UNLOADED,
        "watched": False,
        "dirs": prefix.dirs,
        "config": f"{etc}/{render.SETTINGS}",
        "module": "health.controller.hook",
        "arguments": "",
    }
    text = render.fill(
        "controller.j2",
        what=what,
        program=render.fill("gate.py.j2", **known),
        python=prefix.python,
        slurm_conf=own_conf(config),
    )
    return [WantedFile(path(etc), text, 0o755)]


def own_conf(config: Mapping[str, str]) -> str:
    """Return slurm.conf where it is not in its usual place: slurmctld gives scripts no SLURM_CONF.

    A configless cluster's copy below /run is not for the controller.
    """
    found = value_of(config, "SLURM_CONF")
    return "" if found == "/etc/slurm/slurm.conf" or found.startswith("/run/") else found


def slurm_user(config: Mapping[str, str]) -> str:
    """Return the account that slurmctld runs its scripts as; "": not known."""
    found = re.match(r"[^(\s]+", value_of(config, "SlurmUser"))
    return found[0] if found else ""


def named(etc: str, config: Mapping[str, str], runs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the keys under which slurmctld runs the hook. ``runs``: the scripts run in effect."""
    return [key for key in KEYS if path(etc) in [*scripts_of(config, key), *runs.get(key, ())]]


def site_lines(
    etc: str, config: Mapping[str, str], runs: Mapping[str, Sequence[str]]
) -> list[HookLine]:
    """Return what the site's files lack; a script of the site's own stays."""
    there = named(etc, config, runs)
    several = (release(config) or (0, 0)) >= SEVERAL
    found = []
    for key in KEYS:
        if key in there:
            continue
        theirs = scripts_of(config, key)
        if theirs and not several:
            found.append(HookLine(key, f"{theirs[0]}, on top", path(etc)))
        else:
            found.append(HookLine(key, "slurm.conf", f"{key}={path(etc)}"))
    return found
