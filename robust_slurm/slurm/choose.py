"""The choice of the way to Slurm: its commands, or pyslurm."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from robust_slurm.slurm.by_pyslurm import PySlurm
from robust_slurm.slurm.door import Slurm
from robust_slurm.slurm.errors import SlurmError


def connect(backend: str = "auto", deadline_s: float = 10.0) -> Slurm:
    """Return the client for the setting ``slurm_backend``; it pings before it waits.

    ``backend()`` of the client names the choice and the reason. Raises SlurmError ``invalid``
    where pyslurm is required and not installed.
    """
    if backend == "commands":
        return Slurm(deadline_s=deadline_s, ping_first=True, why="slurm_backend = commands")
    if find_spec("pyslurm") is None:
        why = f"pyslurm is not installed for {sys.executable}"
        if backend == "pyslurm":
            hint = "install robust-slurm[pyslurm] there, or set slurm_backend = auto"
            raise SlurmError("invalid", ("pyslurm",), why, hint)
        return Slurm(deadline_s=deadline_s, ping_first=True, why=why)
    return PySlurm(deadline_s=deadline_s, required=backend == "pyslurm")
