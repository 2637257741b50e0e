"""The doctor's connection to Slurm, by the site's slurm_backend, and the remark on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from health.admin.doctor.site_rules import Remark
from robust_slurm import config as jobs
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.choose import connect


def wanted(path: str | None) -> str:
    """Return slurm_backend of robust.toml; the default where there is none or it is wrong."""
    default = jobs.Config().slurm_backend
    try:
        found = jobs.load(env={}, cwd=Path("/nonexistent"), site_file=Path(path)) if path else None
    except (jobs.ConfigError, OSError):  # a remark of its own
        return default
    return found.slurm_backend if found else default


def door(path: str | None, deadline_s: float) -> Slurm:
    """Connect as robust.toml asks; by commands where pyslurm is wanted and missing."""
    asked = wanted(path)
    return connect("auto" if asked == "pyslurm" else asked, deadline_s)


def remark(
    slurm: Slurm, path: str | None, toml: str, opener: Callable[[str], Slurm] = connect
) -> Remark:
    """Name the backend that robust-status uses; ``slurm``, the doctor's own, may be another."""
    asked = wanted(path)
    used, why = _strict(opener) if asked == "pyslurm" else slurm.backend()
    name = f"slurm_backend = {asked}"
    if asked == "pyslurm" and used != "pyslurm":
        line = 'slurm_backend = "auto"'
        return Remark("fix", name, f"robust-status fails: {why}", toml, line)
    return Remark("ok", name, f"{used} ({why})" if why else used)


def _strict(opener: Callable[[str], Slurm]) -> tuple[str, str]:
    """Return the backend, and why, of a client that accepts only pyslurm."""
    try:
        slurm = opener("pyslurm")
    except SlurmError as error:
        return "commands", error.message
    try:
        return slurm.backend()
    finally:
        slurm.close()
