"""``robust-admin doctor``: looks at Slurm and at this machine's files, prints what is wrong."""

from __future__ import annotations

import glob
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from health import settings
from health.admin import install, node, render, show_config, trust
from health.admin.doctor import (
    backend,
    plugin_rules,
    rules,
    say,
    site_rules,
    state_dir,
)
from health.admin.doctor.site_rules import Bare, Installed, NodeGpus, Remark
from health.admin.install import InstallError
from health.admin.want import SiteFacts, Want
from health.children.call import call_in_child
from health.node import trust as look
from health.node.trust import Hole
from health.settings_last import SUFFIX
from robust_slurm import config as jobs
from robust_slurm.slurm import Slurm, SlurmError, SlurmNode

SLURM_S = 20.0
TRUST_S = 30.0
_NO_FILE = "/nonexistent/robust.toml"
_SCRIPT_LIMIT = 1 << 16  # bytes of a site's own script
_SCRIPTS = ("Prolog", "Epilog", "HealthCheckProgram")


def main(
    etc: str,
    as_json: bool,
    out: IO[str],
    slurm: Slurm | None = None,
    bare: Callable[[Mapping[str, Any]], Bare] | None = None,
) -> int:
    """Exit code 0 nothing to fix, 1 something to fix, 2 Slurm could not be asked."""
    door = slurm if slurm is not None else backend.door(_used(etc), SLURM_S)
    config: Mapping[str, str] = {}
    code = 0
    try:
        door.version()  # is scontrol here at all?
        if not door.ping():
            raise SlurmError("unreachable", ("scontrol", "ping"), "no slurmctld answers")
        config = door.config()
        nodes = door.nodes()
        hosts = {name for node in nodes.values() for name in (node.name, node.hostname)}
        remarks = [
            *_slurm(door, config, nodes, etc),
            backend.remark(door, _used(etc), _toml(etc)),
            *site_rules.of_bare((bare or bare_slurm)(_settings(etc).gate), config, _toml(etc)),
            *plugin_rules.of_plugin(etc, config),
            *_machine(etc, socket.gethostname() in hosts or _short() in hosts),
        ]
    except SlurmError as error:
        code = 2
        asked = "was not asked" if error.no_command else "did not answer"
        what = f"{asked}; only this machine's files were checked: {error}"
        remarks = [Remark("fix", "Slurm", what, "shell", "scontrol ping")]
        problems = [*_settings(etc).problems, *job_settings(_used(etc))[1]]
        remarks += site_rules.of_settings(_toml(etc), os.path.lexists(_toml(etc)), problems)
        remarks += _machine(etc, True)
    finally:
        door.close()
    (say.as_json if as_json else say.as_text)(remarks, config, out)
    return code or int(any(remark.level == "fix" for remark in remarks))


def _toml(etc: str) -> str:
    return f"{etc}/{render.SETTINGS}"


def _settings(etc: str) -> settings.Settings:
    return site_settings(_used(etc))


def _used(etc: str) -> str | None:
    """The path of robust.toml, also if only its copy is left; None: there is neither."""
    path = _toml(etc)
    return path if os.path.lexists(path) or os.path.lexists(path + SUFFIX) else None


def _short() -> str:
    return socket.gethostname().partition(".")[0]


def _slurm(
    door: Slurm, config: Mapping[str, str], nodes: Mapping[str, SlurmNode], etc: str
) -> list[Remark]:
    toml = _toml(etc)
    path = _used(etc)
    found = site_settings(path)
    own, problems = job_settings(path)
    per_node = _per_node(path, list(nodes))
    problems += [p for s in (found, *per_node.values()) for p in s.problems]
    gpus = [
        NodeGpus(name, entry.gres, _expected(per_node.get(name, found)))
        for name, entry in nodes.items()
    ]
    partitions = {n: (p.nodes, p.state) for n, p in door.partitions().items()}
    version = config.get("SLURM_VERSION", "")
    facts = SiteFacts(config, found.gate, etc, runs(config))
    return [
        site_rules.of_release(show_config.release(config), version),
        *site_rules.of_crashes(version),
        *site_rules.of_wants(rules.wants(facts)),
        *site_rules.of_settings(toml, path is not None, list(dict.fromkeys(problems))),
        *site_rules.of_state_dir(state_dir.inspect(found.state_dir), toml),
        *site_rules.of_refused(state_dir.refused(found)),
        site_rules.of_standby(*own, partitions),
        *site_rules.of_gpus(gpus, toml),
    ]


def bare_slurm(gate: Mapping[str, Any]) -> Bare:
    """Try Slurm's commands as the sweep starts them: no PATH but its own, no SLURM_*."""
    own = str(gate["slurm_bin"])
    places = f"{own}:{settings.PLACES}" if own else settings.PLACES
    scontrol = shutil.which("scontrol", path=places)
    if os.geteuid() == 0:
        places, holes = look.slurm_path(places)
        if holes:
            return Bare(places, "", "", holes[0])
    if scontrol is None:
        elsewhere = os.path.dirname(shutil.which("scontrol") or "")  # noqa: PTH120
        return Bare(places, elsewhere, "" if elsewhere else "there is no scontrol")
    try:
        done = subprocess.run(
            [scontrol, "ping"],
            env={"PATH": places, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SLURM_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Bare(places, "", str(error))
    said = " ".join((done.stderr or done.stdout).split())[-200:]
    return Bare(places, "", "" if re.search(r" is UP\b", done.stdout) else said or "no answer")


def _machine(etc: str, is_node: bool) -> list[Remark]:
    stubs = [stub.name for stub in render.STUBS]
    try:
        manifest = install.read_manifest(etc)
        files = [_installed(path, record) for path, record in manifest.get("files", {}).items()]
    except InstallError as error:
        return [Remark("fix", etc, str(error))]
    found = site_rules.of_files(etc, bool(manifest), files, stubs, is_node)
    found += _site_commands(_settings(etc)) if is_node else []
    found += _active_python(str(_settings(etc).active["python"])) if is_node else []
    where = manifest.get("site", {})
    if not where:
        return found
    broken, notes = "", []
    prefix = str(Path(where["python"]).parent.parent)
    holes: list[Hole] = []
    try:
        holes = trust.code(where["python"], where["dirs"])
        if not holes or os.geteuid() != 0:  # root runs nothing that others could change
            notes = node.probe(where["python"], where["dirs"])
    except InstallError as error:
        broken = str(error)
    repair = trust.repair(prefix, holes) if holes else ""
    return [*found, *site_rules.of_code(prefix, [str(h) for h in holes], repair, broken, notes)]


def _site_commands(found: settings.Settings) -> list[Remark]:
    """The programs that root runs for the site, here."""
    sites = found.options("site")["commands"]
    commands = [(f"[health.site] {name}", of["argv"]) for name, of in sites.items()]
    commands += [("[accusations] tests", [path]) for path in found.accusations["tests"]]
    return [
        Remark(
            "fix",
            f"{name}: {argv[0]}",
            f"is not run: {hole}",
            "shell",
            trust.close([hole.place]),
        )
        for name, argv in commands
        if (hole := _command_hole(argv))
    ]


def _command_hole(argv: Sequence[str]) -> Hole | None:
    """The place where others than root could change what a command of the site's runs."""
    try:
        look.command(argv)
    except OSError as error:
        return Hole(str(error.filename or argv[0]), str(error.strerror))
    return None


def _active_python(python: str) -> list[Remark]:
    """The interpreter of the active tests, which root runs."""
    if not python:
        return []

    def hole_in() -> list[str]:
        try:
            look.interpreter(python)
        except PermissionError as error:
            return [str(error.filename or python), str(error.strerror)]
        return []

    hole, problem = call_in_child(hole_in, TRUST_S)
    return site_rules.of_active(python, Hole(*hole) if hole else None, problem)


# ---- looking


def site_settings(path: str | None, name: str = "") -> settings.Settings:
    """robust.toml as the gate of the node ``name`` reads it; None: the defaults."""
    from health.checks import ALL

    found = settings.load(path or _NO_FILE, name, ALL)
    return found if path else found._replace(problems=(), notes=())


def job_settings(path: str | None) -> tuple[tuple[str, bool], list[str]]:
    """The standby partition, whether robust.toml names it, and what is wrong with jobs' keys."""
    import tomllib

    default = jobs.Config().standby_partition
    if path is None:
        return (default, False), []
    try:
        read = jobs.load(env={}, cwd=Path(_NO_FILE).parent, site_file=Path(path), strict=True)
        named = "standby_partition" in tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except jobs.ConfigError as error:
        return (default, False), [str(error)]
    except OSError:  # a link to nothing: told by site_settings
        return (default, False), []
    return (read.standby_partition, named), []


def _per_node(path: str | None, names: Sequence[str]) -> dict[str, settings.Settings]:
    """Each node's settings, where robust.toml has a table for some nodes only."""
    import tomllib

    if path is None:
        return {}
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("nodes")
    except (OSError, ValueError):  # told by site_settings
        tables = None
    if not tables:
        return {}
    return {name: site_settings(path, name) for name in names}


def _expected(found: settings.Settings) -> int:
    return int(found.families.get("gpu_count", {}).get("expected", -1))


def runs(config: Mapping[str, str]) -> dict[str, list[str]]:
    """List, per kind of script, the files that Slurm runs and those that these name."""
    found: dict[str, list[str]] = {}
    for key in _SCRIPTS:
        files: list[str] = []
        for pattern in show_config.scripts_of(config, key):
            for path in [pattern, *glob.glob(pattern)]:  # noqa: PTH207 - a pattern from root
                files += [path, os.path.realpath(path), *_named_in(path)]
        found[key] = list(dict.fromkeys(files))
    return found


def _named_in(path: str) -> list[str]:
    """The absolute paths in a site's own script: it may call ours."""
    try:
        with open(path, "rb") as file:
            text = file.read(_SCRIPT_LIMIT).decode("utf-8", "replace")
    except OSError:
        return []
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    words = "\n".join(lines).replace('"', " ").replace("'", " ").replace(";", " ").split()
    return [word for word in words if word.startswith("/")]


def ask_wants(etc: str, gate: Mapping[str, Any]) -> tuple[list[Want], bool]:
    """The settings that slurm.conf should have; and True, or False if Slurm could not be asked."""
    config = slurm_config()
    return rules.wants(SiteFacts(config, gate, etc, runs(config))), bool(config)


def slurm_config() -> Mapping[str, str]:
    """Return ``scontrol show config``; empty when Slurm cannot be asked."""
    door = Slurm(deadline_s=SLURM_S, ping_first=True)
    try:
        return door.config() if door.ping() else {}
    except SlurmError:
        return {}


def silence() -> str:
    """Return why ``slurm_config`` is empty."""
    door = Slurm(deadline_s=SLURM_S, ping_first=True)
    try:
        door.config()
    except SlurmError as error:
        if error.no_command or error.kind == "version":
            return f"Slurm was not asked: {error.message}"
    return "no slurmctld answers"


def in_use(etc: str) -> list[str] | None:
    """Our scripts that Slurm runs, as lines of slurm.conf; None when Slurm cannot be asked."""
    wants, asked = ask_wants(etc, site_settings(None).gate)
    ours = [want for want in wants if want.key in _SCRIPTS and want.level == "ok"]
    return [f"{want.key}={want.now}" for want in ours] if asked else None


def _installed(path: str, record: Mapping[str, str]) -> Installed:
    there = install.read_path(path)
    changed = install.digest(there.text) != record.get("sha256")
    return Installed(path, there, changed, look.hole(path) if there.kind != "none" else None)
