"""The doctor's remarks on the SPANK plugin, where it is installed or asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from health.admin import install, plugin
from health.admin.doctor.site_rules import Remark
from health.admin.show_config import release
from health.admin.want import Level
from health.node import trust as look

_AGAIN = "robust-admin install --plugin"


def of_plugin(etc: str, config: Mapping[str, str]) -> list[Remark]:
    """Return nothing where nobody has asked for the plugin. ``config`` may be empty."""
    top = plugin.directory(etc)
    path = f"{top}/{plugin.OBJECT}"
    there = install.read_path(path)
    missing = plugin.site_lines(etc, config)
    stack = str(plugin.slurm_dir(config) / plugin.STACK)
    named = all(lines.file != stack for lines in missing)
    if there.kind == "none":
        if not named or not os.path.lexists(f"{top}/{plugin.STACK}"):
            return []  # an include of a file that is not there is no line for Slurm
        what = f"is missing, and {stack} names it: each srun prints an error"
        return [Remark("fix", path, what, "shell", _AGAIN)]
    found = _of_object(path, there, config)
    for program in _programs(top):
        if not os.access(program, os.X_OK):
            what = f"{program} cannot be run: srun lines of --robust jobs run as plain srun"
            found.append(Remark("fix", f"{top}/{plugin.STACK}", what, "shell", _AGAIN))
    for lines in missing:
        level: Level = "fix" if lines.file == stack else "advice"
        what = (
            "does not include the plugin: --robust is unknown to srun, sbatch and salloc"
            if lines.file == stack
            else "does not call robust.lua: users of --robust must write --no-kill themselves"
        )
        found.append(Remark(level, lines.file, what, lines.file, lines.text.rstrip()))
    if not missing and not found:
        what = "is built for the running release, and Slurm's files name it"
        found.append(Remark("ok", path, what))
    return found


def _of_object(path: str, there: install.Present, config: Mapping[str, str]) -> list[Remark]:
    made, runs = plugin.built_for(there.text), release(config)
    found = []
    if made is None:
        found.append(Remark("fix", path, "is no plugin of ours", "shell", _AGAIN))
    elif runs is not None and made != runs:
        what = (
            f"is built for Slurm {plugin.release_text(made)}, and {plugin.release_text(runs)} "
            "runs: srun, sbatch and salloc ignore it, and --robust is unknown"
        )
        found.append(Remark("fix", path, what, "shell", _AGAIN))
    record: Mapping[str, str] = {}
    with contextlib.suppress(install.InstallError):  # robust-admin install says what is wrong
        record = install.read_manifest(str(Path(path).parent)).get("files", {}).get(path, {})
    if record and install.digest(there.text) != record.get("sha256"):
        what = "was changed since it was installed; one cut short ends each srun with SIGBUS"
        found.append(Remark("fix", path, what, "shell", _AGAIN))
    if hole := look.hole(path):
        what = f"{hole}: slurmstepd loads the plugin as root"
        found.append(
            Remark("fix", path, what, "shell", f"chown root {hole.place}; chmod go-w {hole.place}")
        )
    return found


def _programs(top: str) -> list[str]:
    try:
        words = Path(top, plugin.STACK).read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [w.partition("=")[2] for w in words if w.startswith(("robust_srun=", "python="))]
