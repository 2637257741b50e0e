"""The doctor's line on the way to Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from health.admin.doctor import backend
from robust_slurm.slurm import Slurm, SlurmError


class Used(Slurm):
    """A client that says which way it takes."""

    def __init__(self, used: str, why: str) -> None:
        super().__init__()
        self._used = (used, why)

    def backend(self) -> tuple[str, str]:
        return self._used


@pytest.mark.parametrize(
    ("toml", "used", "why", "level", "what"),
    [
        ("", "commands", "pyslurm is not installed", "ok", "commands (pyslurm is not installed)"),
        ("", "pyslurm", "pyslurm 24.11.0", "ok", "pyslurm (pyslurm 24.11.0)"),
        ('slurm_backend = "commands"', "commands", "", "ok", "commands"),
        ('slurm_backend = "pyslurm"', "pyslurm", "pyslurm 24.11.0", "ok", "pyslurm (pyslurm"),
        ('slurm_backend = "pyslurm"', "commands", "it died", "fix", "robust-status fails: it died"),
        ('slurm_backend = "none"', "commands", "", "ok", "commands"),  # told by another remark
    ],
)
def test_the_remark(tmp_path: Path, toml: str, used: str, why: str, level: str, what: str) -> None:
    path = tmp_path / "robust.toml"
    path.write_text(toml + "\n")
    strict = 'slurm_backend = "pyslurm"' in toml
    # On a small cluster the doctor itself, which need not use pyslurm, uses the commands.
    own = Used("commands", "too few nodes") if strict else Used(used, why)
    found = backend.remark(own, str(path), str(path), lambda asked: Used(used, why))
    assert found.level == level and what in found.what
    assert found.subject == f"slurm_backend = {backend.wanted(str(path))}"
    assert backend.remark(Used(used, why), None, "x").subject == "slurm_backend = auto"


def test_pyslurm_is_wanted_and_not_installed(tmp_path: Path) -> None:
    def refuse(asked: str) -> Slurm:
        assert asked == "pyslurm"
        raise SlurmError("invalid", ("pyslurm",), "pyslurm is not installed")

    path = tmp_path / "robust.toml"
    path.write_text('slurm_backend = "pyslurm"\n')
    found = backend.remark(Used("commands", ""), str(path), str(path), refuse)
    assert found.level == "fix" and "robust-status fails: pyslurm is not installed" in found.what
    assert found.line == 'slurm_backend = "auto"'
