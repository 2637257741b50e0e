"""The doctor's line on the way to Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from health.admin.doctor import backend
from robust_slurm.slurm import Slurm


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
    found = backend.remark(Used(used, why), str(path), str(path))
    assert found.level == level and what in found.what
    assert found.subject == f"slurm_backend = {backend.wanted(str(path))}"
    assert backend.remark(Used(used, why), None, "x").subject == "slurm_backend = auto"
