"""The site's settings for the gate: the tables of robust.toml, checked key by key.

The file is read by root before every job: it must belong to root, not be writable by others and
not be a link. A key that cannot be used keeps its default and is named in ``problems``. A file that
is lost, written in part or unusable as a whole is named there too, and the last usable one stays in
force (settings_last.py). ``notes``: the problems of a file that is used all the same.
``problems`` never open or close the gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from health.check import Check, Setting
from health.settings_file import parse, read, whole
from health.settings_merge import Merge, Numbers

SITE_FILE = "/etc/robust-slurm/robust.toml"
# Where Slurm's commands are looked for, behind [gate] slurm_bin: its daemons give scripts no PATH.
PLACES = "/usr/bin:/usr/local/bin:/opt/slurm/bin:/usr/local/slurm/bin:/usr/sbin:/sbin:/bin"

GATE: Mapping[str, Setting] = {
    "enabled": Setting(True, "false: prolog, epilog and sweep do nothing and admit every job"),
    "dry_run": Setting(False, "log what would be drained or undrained, and admit every job"),
    "prolog_deadline": Setting(
        8.0, "time limit of all checks of the prolog; keep it below BatchStartTimeout", "s"
    ),
    "epilog_deadline": Setting(
        30.0, "time limit of all checks of the epilog; keep it below EpilogTimeout", "s"
    ),
    "sweep_deadline": Setting(
        50.0, "time limit of all checks of the sweep; slurmd kills it at 60 s", "s"
    ),
    "nvml_deadline": Setting(
        5.0,
        "time limit of NVML's answers for all GPUs; without persistence mode each GPU may "
        "need seconds",
        "s",
    ),
    "allow_skip": Setting(True, "jobs may skip the checks with --comment or --extra robust:skip"),
    "disabled": Setting([], "families not to run, or ids of findings to drop: the kill switch"),
    "on_missing": Setting(
        "skip",
        "what Slurm's scripts do while the gate's packages cannot be loaded (their file system is "
        'not mounted): "skip": log it, admit the job; "drain": drain the node. Takes effect at the '
        "next robust-admin install",
    ),
    "spool": Setting(
        "/var/lib/robust-slurm", "directory of the node's own records (local disk, owned by root)"
    ),
    "slurm_bin": Setting("", "directory of scontrol; empty: the standard places"),
    "scontrol_deadline": Setting(3.0, "time limit of one scontrol call", "s"),
}
BREAKER: Mapping[str, Setting] = {
    "max_nodes": Setting(
        5, "nodes drained for one cause within the window before draining stops", "nodes"
    ),
    "max_percent": Setting(
        10.0,
        "share of the cluster's nodes drained for one cause within the "
        "window before draining stops",
        "%",
    ),
    "hard_nodes": Setting(
        20, "as max_nodes, for hard evidence (gpu-gone, gpu-missing, xid-79, …)", "nodes"
    ),
    "hard_percent": Setting(20.0, "as max_percent, for hard evidence", "%"),
    "window": Setting(3600.0, "the time over which drains are counted", "s"),
    "max_per_job": Setting(
        2,
        "nodes that one job may cause to be drained, hard evidence not counted; and nodes drained, "
        "within the window or still, for what one user left",
        "nodes",
    ),
    "standing_percent": Setting(
        20.0,
        "share of the cluster's nodes that may be drained automatically at the same time: once "
        "for what users left, and once for all causes but hard evidence",
        "%",
    ),
    "hard_standing_percent": Setting(30.0, "the same share for hard evidence", "%"),
    "hold_down": Setting(
        600.0,
        "shortest time before checks that pass undrain a node; doubles with each further drain "
        "for the same finding within 24 h",
        "s",
    ),
    "hold_times": Setting(
        3, "drains for the same finding of class node within 24 h that require service; 0: never"
    ),
    "lemon_percent": Setting(
        2.0,
        "share of the cluster's nodes that may be drained as lemons, on "
        "users' reports alone; at least one node",
        "%",
    ),
}
LEMON: Mapping[str, Setting] = {
    "strikes": Setting(3, "strikes within the window that make a node a lemon"),
    "users": Setting(2, "different users that the strikes must come from"),
    "accounts": Setting(
        2, "different accounts of Slurm's, where known; 1 where all users share one"
    ),
    "nodes_per_strike": Setting(
        64,
        "a job may give a strike to one node per this many of its nodes, and to at least one",
        "nodes",
    ),
    "window_days": Setting(28.0, "the time over which strikes are counted", "days"),
}
EPILOG: Mapping[str, Setting] = {
    "leftovers": Setting(
        "job",
        'end what the job left: "job": the processes in its cgroup, or with its id in their '
        'environment; "user": all that Slurm started for its user, once the user has no other '
        'job here; never login sessions or services; "never"',
    ),
    "clean_shm": Setting(True, "remove the job's files in /dev/shm"),
    "clean_dirs": Setting([], "directories whose files of the job's user are removed"),
}
ACCUSATIONS: Mapping[str, Setting] = {
    "tests": Setting(
        [], "commands run as root on a reported node: exit 0 PASS, 1 FAIL, else ERROR"
    ),
    "deadline": Setting(20.0, "time limit of all these tests", "s"),
}
ACTIVE: Mapping[str, Setting] = {
    "python": Setting(
        "",
        "interpreter of the active tests (absolute; has torch and robust-slurm; root runs it, so "
        "it and all that it imports must be root's); empty: the gate runs none",
    ),
    "user": Setting(
        "nobody",
        "account of the processes that import torch; it must be able to read the interpreter's "
        'environment; "root": run them as root',
    ),
    "accused": Setting(
        "quick", 'test level for a reported node once no job is on it: "quick" or "never"'
    ),
    "suspicious": Setting(
        False, "test also after a job ended by a signal of its own (SIGSEGV, SIGBUS, SIGABRT, …)"
    ),
    "undrain": Setting(
        "never",
        'test level that a drained node must pass before the sweep undrains it: "quick" or '
        '"never"; slurmd gives the sweep 60 s, so longer levels are for `robust-health burn-in`',
    ),
    "deadline": Setting(25.0, "time limit of all active tests of one epilog or sweep", "s"),
    "burn_in": Setting(
        "standard", 'default level of `robust-health burn-in`: "quick", "standard" or "long"'
    ),
    "floors": Setting(
        Numbers(),
        "lowest results of a healthy GPU, one table per model in place of the published "
        'values: [active.floors."NVIDIA H200"] bf16_tflops = 600; 0: none',
    ),
}
# The tables of the gate, as they stand in robust.toml; [xid], [health.*] and [nodes.*] come on top.
TABLES: Mapping[str, Mapping[str, Setting]] = {
    "gate": GATE,
    "breaker": BREAKER,
    "lemon": LEMON,
    "epilog": EPILOG,
    "accusations": ACCUSATIONS,
    "active": ACTIVE,
}
XID_HELP = (
    'an Xid and the action that it requires at this site: "79" = "reboot"; "none": do not drain'
)
NODES_HELP = 'any of these tables for some nodes only: [nodes."gpu[1-8]".health.disk]; later wins'

_CHOICES = {
    ("gate", "on_missing"): ("skip", "drain"),
    ("epilog", "leftovers"): ("user", "job", "never"),
    ("active", "accused"): ("never", "quick"),
    ("active", "undrain"): ("never", "quick"),
    ("active", "burn_in"): ("quick", "standard", "long"),
}
_PATHS = {("gate", "spool"), ("epilog", "clean_dirs"), ("accusations", "tests")}
_PATHS_OR_NONE = {("gate", "slurm_bin"), ("active", "python")}
_ABOVE_ZERO = {("gate", name) for name in GATE if name.endswith("_deadline")} | {
    ("accusations", "deadline"),
    ("active", "deadline"),
    ("breaker", "window"),
    ("lemon", "window_days"),
}


class Settings(NamedTuple):
    """The site's word and the defaults, merged for one node."""

    gate: Mapping[str, Any]
    breaker: Mapping[str, Any]
    lemon: Mapping[str, Any]
    epilog: Mapping[str, Any]
    accusations: Mapping[str, Any]
    active: Mapping[str, Any]
    xid: Mapping[str, str]  # code -> action
    families: Mapping[str, Mapping[str, Any]]
    state_dir: str  # absolute; "": no shared ledger
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def deadline(self, where: str) -> float:
        """Seconds for all checks at one place; "deep" has the sweep's."""
        return float(self.gate[f"{where}_deadline" if where != "deep" else "sweep_deadline"])

    def options(self, family: str) -> Mapping[str, Any]:
        """The answer to ``System.options``; "xid" also has the site's table as ``overrides``."""
        own = self.families.get(family, {})
        if family != "xid":
            return own
        return {**own, "overrides": {**own.get("overrides", {}), **self.xid}}


def defaults(checks: Iterable[Check]) -> Settings:
    """The settings of a site without robust.toml."""
    merge = Merge(TABLES, checks, _wrong)
    return Settings(
        **merge.tables, xid={}, families=merge.families, state_dir="", problems=(), notes=()
    )


def load(path: str | None, node: str, checks: Iterable[Check]) -> Settings:
    """The settings of ``node`` out of the file; ``path`` None: SITE_FILE, which need not exist."""
    merge = Merge(TABLES, checks, _wrong)
    file = path or SITE_FILE
    found: Mapping[str, Any] = {}
    note = ""
    try:
        text = read(file)[0]
        kept = None
        if not text.strip():  # as a full disk or a power failure leaves it
            from health.settings_last import lost

            kept = lost(file, ValueError("is empty"))
        if text.strip() and not whole(text):
            from health.settings_last import unmarked

            found, told, note = unmarked(file, text)
        else:
            found, told = kept or (parse(text), "")
        merge.problems += [text for text in (told, note) if text]
    except FileNotFoundError as error:
        from health.settings_last import lost

        kept = lost(file, error)
        if kept:
            found = kept[0]
            merge.problems.append(kept[1])
        elif path:
            merge.problems.append(f"{path}: no such file; the defaults apply")
    except (OSError, ValueError, RecursionError) as error:
        from health.settings_last import instead

        found, told = instead(file, error)
        merge.problems.append(told)
    merge.add(found, "", node)
    state_dir = _state_dir(found.get("state_dir", ""), merge.problems)
    return Settings(
        **merge.tables,
        xid=merge.xid,
        families=merge.families,
        state_dir=state_dir,
        problems=tuple(merge.problems),
        notes=(note,) if note else (),
    )


def _state_dir(value: Any, problems: list[str]) -> str:
    if not value:
        return ""
    if isinstance(value, str) and value.startswith("/"):
        return value.rstrip("/")
    if not (isinstance(value, str) and value.startswith("~")):
        problems.append(f"state_dir = {value!r}: not an absolute path; no shared ledger")
    return ""  # a home directory: each user's own, nothing for root to share


def _wrong(table: str, key: str, value: Any) -> str:
    """The error in a value of the gate's own tables beyond its type; "" if there is none."""
    at = (table, key)
    if at in _CHOICES and value not in _CHOICES[at]:
        return f"use one of {', '.join(_CHOICES[at])}"
    paths = value if isinstance(value, list) else [value]
    if at in _PATHS and any(path[:1] != "/" for path in paths):
        return "not an absolute path"
    if at in _PATHS_OR_NONE and value and value[0] != "/":
        return "not an absolute path"
    if at in _ABOVE_ZERO and value <= 0:
        return "must be above 0"
    if table and isinstance(value, int | float) and value < 0:
        return "must not be below 0"
    return ""
