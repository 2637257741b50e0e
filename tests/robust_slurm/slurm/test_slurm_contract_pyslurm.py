"""The contract of the door to Slurm, by a real pyslurm, where a root that has one was built."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from places import REPOSITORY

from lab.slurm import pyslurm_root

ROOT = pyslurm_root.CACHE / pyslurm_root.NAME
LIMIT_S = 300.0


@pytest.mark.cluster
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can enter another root")
@pytest.mark.skipif(
    not ROOT.is_dir(),
    reason=f"{ROOT} is not there: python -m lab.slurm.pyslurm_root --source FILE builds it",
)
def test_a_real_pyslurm_keeps_the_contract() -> None:
    command = [*pyslurm_root.CONTRACT, "-k", "pyslurm", "-p", "no:cacheprovider", "-rs"]
    done = subprocess.run(
        [sys.executable, "-m", "lab.slurm.pyslurm_root", *command],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\b1\d passed, \d+ deselected in", done.stdout), done.stdout[-2000:]
