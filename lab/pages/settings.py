"""docs/settings.md: every setting with its default, its unit and the file that defines it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from health.check import Setting
from health.checks import ALL
from health.settings import NODES_HELP, TABLES, XID_HELP
from health.settings_file import END
from lab.pages.markup import MARK, cell, code, table
from robust_slurm.config import SITE_FILE
from robust_slurm.settings import FIELDS

# The settings in the order in which a reader looks for them; a test demands that none is missing.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Mode, records and Slurm": (
        "mode", "state_dir", "slurm_backend", "slurm_wait", "drain", "verbose", "log_level",
        "roster_interval", "interval", "signatures_file", "on_incident", "site_on_incident",
    ),
    "Replacing a lost node": (
        "spares", "standby_partition", "lease_partition", "standby_wait", "shrink_wait", "min_nodes", "requeue",
        "requeue_on", "max_restarts", "early_restart", "place", "mesh", "place_alpha",
    ),
    "Detecting hangs, slow ranks and bad losses": (
        "auto", "progress_regex", "hang", "hang_floor", "hang_limit", "busy_limit", "start_limit", "slow",
        "slow_after", "nan", "spike",
    ),
    "Waiting for a network, a file system, a node": (
        "outage_wait", "stall_limit", "mute_limit", "suspend_limit",
        "task_start_limit", "launch_limit", "standby_start_limit",
    ),
    "Starting and stopping ranks": (
        "rank_env", "warm", "warm_packages", "rejoin_limit", "stop_grace", "stop_work_limit",
        "stop_margin", "task_python",
    ),
    "Testing the machines": (
        "stop_tests", "test_python", "replay", "replay_limit", "replay_rounds", "replay_fixed",
    ),
    "New code for a running job": (
        "code", "code_store", "code_exclude", "code_limit", "code_keep", "code_trial",
    ),
}  # fmt: skip
CHECKPOINTS, OTHER = "Checkpoints", "Other"

_HEAD = f"""# Settings

{MARK}

## Where a setting comes from

The strongest first:

1. the command line: `--robust-spares=1`, and `--robust-no-warm` for a switch that is on by default
2. the environment: `ROBUST_SPARES=1`
3. the file that `ROBUST_CONFIG` or `--robust-config` names, else `./robust.toml`: `spares = 1`
4. the site's file `{SITE_FILE}`: the same keys, before its first table
5. the default in the tables below

`robust-srun --robust-help` prints the settings of jobs, and `robust-srun --robust-explain` prints
the rules of recovery with the limits in force. Which settings must keep an order is in
[time limits](timings.md#settings-whose-order-is-checked).

## Settings of jobs

They are defined in `robust_slurm/settings.py`. Each is an option of robust-srun, a variable and a
key: `spares` is `--robust-spares=N`, `ROBUST_SPARES=N` and `spares = N`.
"""
_GATE = f"""
## Settings of the node gate

They are defined in `health/settings.py` and stand in tables of `{SITE_FILE}`, which belongs to root
([how the file is read](admin.md#robusttoml)). The last line of that file is `{END}`: without it, the
last version that had it stays in force. No option and no variable replaces these settings.
"""
_GATE_TABLES = {
    "gate": "The gate itself",
    "breaker": "Limits on draining",
    "lemon": "Nodes that many jobs report",
    "epilog": "What the epilog clears",
    "accusations": "Tests of reported nodes",
    "active": "Active tests",
}


def page() -> str:
    """Return the page."""
    lines = [_HEAD]
    for title, names in groups().items():
        lines += [f"### {title}", "", *table(_COLUMNS, map(_job_row, names)), ""]
    lines += [_GATE]
    for name, settings in TABLES.items():
        lines += [f"### [{name}]: {_GATE_TABLES.get(name, name)}", ""]
        lines += [*table(_GATE_COLUMNS, _gate_rows(settings)), ""]
    lines += ["### [xid]: actions of Xids", "", f"`[xid]`: {cell(XID_HELP)}.", ""]
    lines += ["### [nodes]: settings of some nodes", "", f"`[nodes.…]`: {cell(NODES_HELP)}.", ""]
    lines += ["## Settings of the checks", ""]
    lines += [
        "Each family of checks has a table `[health.FAMILY]`, defined with the check below "
        "`health/checks/` and explained on its page.",
        "",
    ]
    for check in ALL:
        if not check.settings:
            continue
        lines += [f"### [health.{check.name}]", "", f"[What it checks](checks/{check.name}.md)", ""]
        lines += [*table(_GATE_COLUMNS, _gate_rows(check.settings)), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


_COLUMNS = ("setting", "default", "unit", "meaning")
_GATE_COLUMNS = ("key", "default", "unit", "meaning")


def groups() -> dict[str, list[str]]:
    """Return all settings by subject: none is left out, and a new one is in a group of its own."""
    found = {title: [name for name in names if name in FIELDS] for title, names in GROUPS.items()}
    listed = {name for names in found.values() for name in names}
    rest = [name for name in FIELDS if name not in listed]
    found[CHECKPOINTS] = [name for name in rest if name.startswith("checkpoint")]
    found[OTHER] = [name for name in rest if not name.startswith("checkpoint")]
    return {title: names for title, names in found.items() if names}


def _job_row(name: str) -> tuple[str, ...]:
    field = FIELDS[name]
    meta = field.metadata
    text = meta["help"]
    if meta["choices"]:
        text += f" (one of {', '.join(meta['choices'])})"
    elif field.type in ("int", "float") and meta["minimum"]:
        text += f"; at least {meta['minimum']:g}"
    return (
        f'<a id="{name}"></a>{code(name)}', code(_toml(field.default)), meta["unit"], cell(text)
    )  # fmt: skip


def _gate_rows(settings: Mapping[str, Setting]) -> list[tuple[str, ...]]:
    return [
        (code(name), code(_toml(each.default)), each.unit, cell(each.help))
        for name, each in settings.items()
    ]


def _toml(default: object) -> str:
    """Return a default as robust.toml writes it."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, str | Path):
        return f'"{default}"'
    if isinstance(default, list | tuple):
        return "[" + ", ".join(map(_toml, default)) + "]"
    if isinstance(default, int | float):
        return f"{default:g}"
    return "{}"
