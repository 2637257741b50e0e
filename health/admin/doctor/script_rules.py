"""The settings in slurm.conf that make slurmd run our scripts, and how and when. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from health.admin.show_config import joined, scripts_of, seconds, value_of, words_of
from health.admin.want import Level, SiteFacts, Want, longest, since

HEALTH_CHECK_LIMIT_S = 60  # slurmd's own, fixed before 26.05
SWEEP_EVERY_S = 300


def scripts(facts: SiteFacts) -> Iterator[Want]:
    """Prolog and Epilog."""
    for key, name, why in (
        ("Prolog", "prolog", "checks the node before a job starts on it, and drains it"),
        (
            "Epilog",
            "epilog",
            "removes what a job left, checks the node, verifies reports against it",
        ),
    ):
        ours, now = f"{facts.etc}/{name}", scripts_of(facts.config, key)
        if ours in facts.runs.get(key, now):
            yield Want(key, ", ".join(now), ours, "ok", why, True)
            continue
        want = Want(key, ", ".join(now), ours, "fix", why, True)
        if now and since(facts, 24, 5):
            want = want._replace(why=f"{why}; a line of its own: {key}={now[0]} stays")
        elif now:
            want = _beside(want, now[0])
        yield want


def _beside(want: Want, theirs: str) -> Want:
    """Add our script to the site's own, where Slurm takes one value only."""
    key, ours = want.key, want.value
    where, _, pattern = theirs.rpartition("/")
    if not set(theirs) & set("*?["):
        paste = f"{ours} || exit $?" if key != "HealthCheckProgram" else ours
        why = f"{want.why}; it takes one script only: call ours from yours"
        return want._replace(why=why, paste=paste, where=f"{theirs}, on top")
    name = pattern.replace("*", "robust")
    why = f"{want.why}; {theirs} stays: ours beside yours, on every node"
    if set(f"{where}{name}") & set("*?["):  # no name that is sure to match
        why = f"{want.why}; link {ours} to a name that {theirs} matches, on every node"
        return want._replace(why=why, paste=f"ln -s {ours} {where}/<name>", where="shell")
    return want._replace(why=why, paste=f"ln -s {ours} {where}/{name}", where="shell")


def health_program(facts: SiteFacts) -> Iterator[Want]:
    """The sweep's script."""
    key, ours = "HealthCheckProgram", f"{facts.etc}/healthcheck"
    now = value_of(facts.config, key)
    why = (
        "the sweep: checks nodes between jobs, and undrains nodes that robust-slurm drained "
        "once they pass"
    )
    good = ours in facts.runs.get(key, [now])
    want = Want(key, now, ours, "ok" if good else "fix", why, True)
    yield _beside(want, now) if now and not good else want


def health_when(facts: SiteFacts) -> Iterator[Want]:
    """The sweep's interval, the states of nodes that it runs on, and the time that it may take."""
    config, gate = facts.config, facts.gate
    now = value_of(config, "HealthCheckInterval")
    every = seconds(now) or 0
    least = longest(gate, "sweep")
    good = every >= least
    why = "seconds between sweeps; at 0 none runs, not even when slurmd starts after a boot"
    value = f"{every:g}" if good else str(max(SWEEP_EVERY_S, math.ceil(least)))
    yield Want("HealthCheckInterval", now, value, "ok" if good else "fix", why, True)

    now = value_of(config, "HealthCheckNodeState")
    states = words_of(now.upper())
    good = not states or "ANY" in states or "IDLE" in states
    why = (
        "ANY sees a GPU fail under a running job; IDLE drained nodes too; under the other values "
        "no node is ever undrained"
    )
    value = (now if good else joined(["ANY"], [s for s in states if s == "CYCLE"])) or "ANY"
    yield Want("HealthCheckNodeState", now, value, "ok" if good else "fix", why, True)

    limit = seconds(value_of(config, "HealthCheckTimeout"))
    if limit is not None:  # 26.05, which prints its default as 0
        limit = limit or HEALTH_CHECK_LIMIT_S
        why = f"slurmd kills the sweep then; it may take {least:g} s (sweep_deadline)"
        level: Level = "ok" if limit >= least else "fix"
        value = f"{limit if level == 'ok' else math.ceil(least):g}"
        yield Want("HealthCheckTimeout", config["HealthCheckTimeout"], value, level, why, False)


def prep(facts: SiteFacts) -> Iterator[Want]:
    """Slurmd's needs for running scripts at all: its plugin for them, and root."""
    now = value_of(facts.config, "PrEpPlugins")
    if now and "prep/script" not in now:
        value = joined(now.split(","), ["prep/script"])
        yield Want("PrEpPlugins", now, value, "fix", "without it no Prolog is run", True)
    user = value_of(facts.config, "SlurmdUser")
    if user and not user.startswith("root("):
        why = "prolog and epilog read GPUs, the kernel's log and other users' processes"
        yield Want("SlurmdUser", user, "root", "fix", why, True)
