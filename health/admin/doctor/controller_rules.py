"""The doctor's remarks on the controller hooks, where they are installed or named."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence

from health.admin import controller, install, trust
from health.admin.doctor.site_rules import Remark
from health.node import trust as look

_AGAIN = "robust-admin install --controller"


def of_controller(
    etc: str, config: Mapping[str, str], runs: Mapping[str, Sequence[str]], host: bool
) -> list[Remark]:
    """Return nothing where nobody has asked for the hooks. ``host``: slurmctld runs here."""
    path = controller.path(etc)
    there = install.read_path(path)
    named = controller.named(etc, config, runs)
    if there.kind == "none":
        if not (named and host):
            return []
        what = f"is missing, and slurmctld runs it as {' and '.join(named)}"
        if "PrologSlurmctld" in named:
            what += ": jobs may go back to the queue at their start"
        return [Remark("fix", path, what, "shell", _AGAIN)]
    found = _of_file(path, there)
    for line in controller.site_lines(etc, config, runs):
        if line.key == "PrologSlurmctld" and "EpilogSlurmctld" in named:
            continue  # optional, and chosen so
        what = f"is not named: {controller.WHY[line.key]}"
        found.append(Remark("advice", line.key, what, line.where, line.line))
    user = controller.slurm_user(config)
    if named and not found:
        found.append(Remark("ok", path, f"slurmctld runs it as {user or 'SlurmUser'}"))
    return found


def makes_directories(
    etc: str, config: Mapping[str, str], runs: Mapping[str, Sequence[str]]
) -> bool:
    """Return whether the hook makes the jobs' directories: only root can give them away."""
    named = controller.named(etc, config, runs)
    return "PrologSlurmctld" in named and controller.slurm_user(config) == "root"


def is_host(config: Mapping[str, str], own: str) -> bool:
    """Return whether a slurmctld runs on the host ``own`` (its short name)."""
    hosts = [value for key, value in config.items() if key.startswith("SlurmctldHost")]
    return any(host.partition("(")[0].partition(".")[0] == own for host in hosts)


def _of_file(path: str, there: install.Present) -> list[Remark]:
    found = []
    record: Mapping[str, str] = {}
    with contextlib.suppress(install.InstallError):  # robust-admin install says what is wrong
        top = os.path.dirname(path)  # noqa: PTH120
        record = install.read_manifest(top).get("files", {}).get(path, {})
    if record and install.digest(there.text) != record.get("sha256"):
        found.append(Remark("fix", path, "was changed since it was installed", "shell", _AGAIN))
    if not there.mode & stat.S_IXOTH:
        found.append(Remark("fix", path, "SlurmUser cannot run it", "shell", _AGAIN))
    if hole := look.hole(path):
        what = f"{hole}: who can write there may order slurmctld about"
        repair = trust.close([hole.place])
        found.append(Remark("fix", path, what, "shell", repair))
    return found
