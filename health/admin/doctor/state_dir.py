"""The site's state directory, looked at by a child with a deadline: its file system may be dead."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from health import settings
from health.admin import install
from health.admin.doctor import site_rules
from health.admin.doctor.site_rules import StateDir
from health.admin.install import Present
from health.children.call import call_in_child
from health.gate.reserve import refused_lately

LIMIT_S = 5.0


def inspect(path: str) -> StateDir:
    """The state directory, by a child with a deadline: it may lie on a dead file system."""
    if not path:
        return StateDir("")
    answer, problem = call_in_child(lambda: _state(path), LIMIT_S)
    if problem:
        return StateDir(path, problem)
    return StateDir(path, "", *answer[:2], *(Present(*row) for row in answer[2:]))


def refused(found: settings.Settings) -> list[Sequence[Any]]:
    """Drains that the circuit breaker refused within its window; empty if these cannot be read."""
    since = time.time() - float(found.breaker["window"])
    if not found.state_dir:
        return []
    answer, _ = call_in_child(lambda: refused_lately(found.state_dir, since), LIMIT_S)
    return answer or []


def make(path: str) -> list[str]:
    """Make what is missing in the state directory, never the directory itself: it may only not be
    mounted. Says what was made, and what is still to do."""
    if not path:
        return []
    made, problem = call_in_child(lambda: _make(path), LIMIT_S)
    if problem:
        return [f"state_dir {path}: {problem}"]
    remarks = site_rules.of_state_dir(inspect(path), "")
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
    from health.node.mountinfo import holding, visible
    from robust_slurm.linux.filesystem_types import is_served

    os.listdir(path)  # noqa: PTH208 - the error must name the path, and the names are not wanted
    mounts = visible(Path("/proc/self/mountinfo").read_text(errors="replace"))
    mount = holding(mounts, os.path.realpath(path))
    kind = mount.fstype if mount else ""
    return [
        kind,
        is_served(kind),
        install.read_path(f"{path}/nodes"),
        install.read_path(f"{path}/jobs"),
    ]
