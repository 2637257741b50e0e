"""A setting of slurm.conf as the gate wants it, and the facts that its rule decides on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from health.admin.show_config import release

Level = Literal["ok", "fix", "advice"]

SLURM_CONF = "slurm.conf"
# slurmd kills what overruns a time-out 10 ms after SIGTERM: our own deadlines end well before.
MARGIN_S = 2.0


class SiteFacts(NamedTuple):
    """``config`` is ``scontrol show config``, empty when Slurm could not be asked; ``gate`` the
    table of robust.toml; ``runs`` for Prolog, Epilog and HealthCheckProgram the files that are
    run in effect: globs expanded, and what a site's own script calls."""

    config: Mapping[str, str]
    gate: Mapping[str, Any]
    etc: str
    runs: Mapping[str, Sequence[str]] = {}


class Want(NamedTuple):
    """One setting: its value ``now`` ("": not set), the ``value`` it should have, and why.

    ``needed``: the gate does not work without; else it is advice. ``paste``: the line where it is
    not ``key=value``, and ``where`` it goes: slurm.conf, cgroup.conf, "shell", or a
    script of the site's.
    """

    key: str
    now: str
    value: str
    level: Level
    why: str
    needed: bool
    paste: str = ""
    where: str = SLURM_CONF

    def line(self) -> str:
        return self.paste or f"{self.key}={self.value}"


def since(facts: SiteFacts, major: int, minor: int) -> bool:
    """True if Slurm is this new. False if not known, since an old one stops at a word it lacks."""
    known = release(facts.config)
    return known is not None and known >= (major, minor)


def longest(gate: Mapping[str, Any], where: str) -> float:
    """The most that one run takes: all checks, then two calls of scontrol to drain the node."""
    return float(gate[f"{where}_deadline"]) + 2 * float(gate["scontrol_deadline"]) + MARGIN_S
