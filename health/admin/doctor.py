"""``robust-admin doctor``: looks at Slurm and at this machine's files, prints what is wrong."""

from __future__ import annotations

import glob
import json
import os
import stat
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from health import settings
from health.admin import install, node, render, rules, site_rules
from health.admin.install import InstallError, Present
from health.admin.site_rules import Installed, NodeGpus, Remark, StateDir
from health.aside import aside
from robust_slurm import config as jobs
from robust_slurm.slurm import Slurm, SlurmError

JSON_VERSION = 1
_WIDTH = 88
SLURM_S = 20.0
STATE_DIR_S = 5.0
_NO_FILE = "/nonexistent/robust.toml"
_MOST_PARTS = 200  # of a path, links followed
_SCRIPT_LIMIT = 1 << 16  # bytes of a site's own script
_SCRIPTS = ("Prolog", "Epilog", "HealthCheckProgram")


def main(etc: str, as_json: bool, out: IO[str], slurm: Slurm | None = None) -> int:
    """Exit code 0 nothing to fix, 1 something to fix, 2 Slurm could not be asked."""
    door = slurm if slurm is not None else Slurm(deadline_s=SLURM_S)
    try:
        door.version()  # is scontrol here at all?
        if not door.ping():
            raise SlurmError("unreachable", ("scontrol", "ping"), "no slurmctld answers")
        config = door.config()
        remarks = [*_slurm(door, config, etc), *_machine(etc)]
    except SlurmError as error:
        print(f"robust-admin doctor: {error}", file=sys.stderr)
        return 2
    if as_json:
        _print_json(remarks, config, out)
    else:
        _print(remarks, config, out)
    return int(any(remark.level == "fix" for remark in remarks))


def _slurm(door: Slurm, config: Mapping[str, str], etc: str) -> list[Remark]:
    toml = f"{etc}/{render.SETTINGS}"
    path = toml if Path(toml).exists() else None
    found = site_settings(path)
    own, problems = _job_settings(path)
    nodes = door.nodes()
    per_node = _per_node(path, list(nodes))
    problems += [p for s in (found, *per_node.values()) for p in s.problems]
    gpus = [
        NodeGpus(name, entry.gres, _expected(per_node.get(name, found)))
        for name, entry in nodes.items()
    ]
    partitions = {n: (p.nodes, p.state) for n, p in door.partitions().items()}
    version = config.get("SLURM_VERSION", "")
    facts = rules.Facts(config, found.gate, etc, runs(config))
    return [
        site_rules.of_release(rules.release(config), version),
        *site_rules.of_wants(rules.wants(facts)),
        *site_rules.of_settings(toml, path is not None, list(dict.fromkeys(problems))),
        *site_rules.of_state_dir(look_at_state(found.state_dir), toml),
        site_rules.of_standby(*own, partitions),
        *site_rules.of_gpus(gpus, toml),
    ]


def _machine(etc: str) -> list[Remark]:
    stubs = [stub.name for stub in render.STUBS]
    try:
        manifest = install.read_manifest(etc)
        files = [_installed(path, record) for path, record in manifest.get("files", {}).items()]
    except InstallError as error:
        return [Remark("fix", etc, str(error))]
    found = site_rules.of_files(etc, bool(manifest), files, stubs)
    where = manifest.get("site", {})
    if not where:
        return found
    broken, notes = "", []
    try:
        notes = node.probe(where["python"], where["dirs"])
    except InstallError as error:
        broken = str(error)
    prefix = str(Path(where["python"]).parent.parent)
    return [*found, *site_rules.of_code(prefix, _untrusted_code(where), broken, notes)]


# ---- looking


def site_settings(path: str | None, name: str = "") -> settings.Settings:
    """robust.toml as the gate of the node ``name`` reads it; None: the defaults."""
    from health.checks import ALL

    found = settings.load(path or _NO_FILE, name, ALL)
    return found if path else found._replace(problems=())


def _job_settings(path: str | None) -> tuple[tuple[str, bool], list[str]]:
    """The standby partition, whether robust.toml names it, and what is wrong with jobs' keys."""
    import tomllib

    default = jobs.Config().standby_partition
    if path is None:
        return (default, False), []
    try:
        read = jobs.load(env={}, cwd=Path(_NO_FILE).parent, site_file=Path(path))
        named = "standby_partition" in tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except jobs.ConfigError as error:
        return (default, False), [str(error)]
    return (read.standby_partition, named), []


def _per_node(path: str | None, names: Sequence[str]) -> dict[str, settings.Settings]:
    """Each node's settings, where robust.toml has a table for some nodes only."""
    if path is None or "nodes" not in Path(path).read_text(encoding="utf-8", errors="replace"):
        return {}
    return {name: site_settings(path, name) for name in names}


def _expected(found: settings.Settings) -> int:
    return int(found.families.get("gpu_count", {}).get("expected", -1))


def runs(config: Mapping[str, str]) -> dict[str, list[str]]:
    """For each kind of script the files that Slurm runs, with those that they name themselves."""
    found: dict[str, list[str]] = {}
    for key in _SCRIPTS:
        files: list[str] = []
        for pattern in rules.scripts_of(config, key):
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


def ask_wants(etc: str, gate: Mapping[str, Any]) -> tuple[list[rules.Want], bool]:
    """What slurm.conf should say, and whether Slurm could be asked what it says."""
    door = Slurm(deadline_s=SLURM_S)
    try:
        config = door.config() if door.ping() else {}
    except SlurmError:
        config = {}
    return rules.wants(rules.Facts(config, gate, etc, runs(config))), bool(config)


def in_use(etc: str) -> list[str]:
    """Which of our scripts Slurm runs; empty also when it cannot be asked."""
    wants, asked = ask_wants(etc, site_settings(None).gate)
    return [f"{w.key}={w.value}" for w in wants if asked and w.key in _SCRIPTS and w.level == "ok"]


def look_at_state(path: str) -> StateDir:
    """The state directory, by a child with a deadline: it may lie on a dead file system."""
    if not path:
        return StateDir("")
    answer, problem = aside(lambda: _state(path), STATE_DIR_S)
    if problem:
        return StateDir(path, problem)
    return StateDir(path, "", *answer[:2], *(Present(*row) for row in answer[2:]))


def make_state(path: str) -> list[str]:
    """Make what is missing in the state directory, never the directory itself: it may only not be
    mounted. Says what was made, and what is still to do."""
    if not path:
        return []
    made, problem = aside(lambda: _make(path), STATE_DIR_S)
    if problem:
        return [f"state_dir {path}: {problem}"]
    remarks = site_rules.of_state_dir(look_at_state(path), "")
    todo = [f"{r.subject}: {r.what}; {r.line}" for r in remarks if r.level == "fix"]
    return [*(f"made {name}" for name in made), *todo]


def _make(path: str) -> list[str]:
    made = []
    for name, mode in (("nodes", 0o755), ("jobs", 0o1777)):
        try:
            Path(path, name).mkdir()
        except FileExistsError:
            continue
        Path(path, name).chmod(mode)
        made.append(f"{path}/{name}")
    return made


def _state(path: str) -> list[Any]:
    from health.mountinfo import holding, is_remote, visible

    os.listdir(path)  # noqa: PTH208 - the error must name the path, and the names are not wanted
    mounts = visible(Path("/proc/self/mountinfo").read_text(errors="replace"))
    mount = holding(mounts, os.path.realpath(path))
    kind = mount.fstype if mount else ""
    return [kind, is_remote(kind), install.look(f"{path}/nodes"), install.look(f"{path}/jobs")]


def _installed(path: str, record: Mapping[str, str]) -> Installed:
    there = install.look(path)
    changed = install.digest(there.text) != record.get("sha256")
    return Installed(path, there, changed, untrusted(path) if there.kind != "none" else "")


def untrusted(path: str) -> str:
    """Who but root could put something else at this path; empty: nobody.

    Looks at the file and at every directory and link on the way to it.
    """
    way = _way(path)
    if not way:
        return f"{path}: too many levels of symbolic links"
    for place in way:
        try:
            info = os.lstat(place)
        except OSError as error:
            return f"{place}: {error.strerror}"
        if info.st_uid != 0:
            return f"{place} belongs to uid {info.st_uid}"
        sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        if info.st_mode & 0o022 and not sticky and not stat.S_ISLNK(info.st_mode):
            return f"{place} can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
    return ""


def _way(path: str) -> list[str]:
    """Every directory and link on the way to a path, and what it ends at; empty: it never ends."""
    passed = ["/"]
    parts = path.split("/")[::-1]
    while parts:
        if len(passed) > _MOST_PARTS:
            return []
        part = parts.pop()
        if part == "..":
            passed.append(str(Path(passed[-1]).parent))
        elif part not in ("", "."):
            place = f"{passed[-1].rstrip('/')}/{part}"
            passed.append(place)
            try:
                target = os.readlink(place)  # noqa: PTH115 - a plain string is wanted
            except OSError:  # no link
                continue
            parts += target.split("/")[::-1]
            passed.append("/" if target.startswith("/") else str(Path(place).parent))
    return list(dict.fromkeys(passed))


def _untrusted_code(where: Mapping[str, Any]) -> list[str]:
    """Of all that the stubs execute: the interpreter, our packages, pynvml."""
    names = ["health", "prolog", "epilog", "robust_slurm", "ClusterShell"]
    paths = [where["python"]]
    for top in where["dirs"]:
        paths += [f"{top}/pynvml.py"] if Path(top, "pynvml.py").exists() else []
        for name in names:
            for parent, below, files in os.walk(f"{top}/{name}"):
                below.sort()
                paths += [f"{parent}/{file}" for file in files if file.endswith((".py", ".pyc"))]
    return [why for path in paths if (why := untrusted(path))]


# ---- saying


def _print_json(remarks: Iterable[Remark], config: Mapping[str, str], out: IO[str]) -> None:
    json.dump(
        {
            "version": JSON_VERSION,
            "slurm": config.get("SLURM_VERSION", ""),
            "cluster": config.get("ClusterName", ""),
            "remarks": [remark._asdict() for remark in remarks],
        },
        out,
        indent=1,
    )
    out.write("\n")


_WORD = {"fix": "FIX", "advice": "ADVICE"}


def _print(remarks: Sequence[Remark], config: Mapping[str, str], out: IO[str]) -> None:
    """Faults first; below each why, and the line to paste."""
    out.write(f"cluster {config.get('ClusterName')}, Slurm {config.get('SLURM_VERSION')}\n")
    for level, word in _WORD.items():
        for remark in remarks:
            if remark.level != level:
                continue
            out.write(f"\n{word:<7}{remark.subject}\n")
            for line in textwrap.wrap(remark.what, _WIDTH, break_on_hyphens=False):
                out.write(f"       {line}\n")
            where = f"{remark.where}:"
            for line in remark.line.splitlines():
                out.write(f"       {where:<12} {line}\n")
                where = ""
    count = {level: sum(r.level == level for r in remarks) for level in ("fix", "advice", "ok")}
    out.write(f"\n{count['fix']} to fix, {count['advice']} advice, {count['ok']} in order\n")
