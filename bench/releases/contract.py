"""The cell of pyslurm: the contract of the door to Slurm, held by pyslurm, in a root that has it.

pyslurm must be built for the release: one is (24.11; lab/slurm/pyslurm_root.py), in a Debian of
its own, whose Slurm is of the same packages as the lab's.
"""

from __future__ import annotations

import re
import time

from bench.common import BenchError
from lab.errors import LabError
from lab.slurm import pyslurm_root

_WHY_NOT = {
    "22.05": "robust-slurm uses no pyslurm before 23.11: its API is another",
    "26.05": "there is no pyslurm of 26.05 yet; that of 25.11 needs the library of Slurm 25.11, "
    "which Debian does not serve: building both from source was not tried",
}


def why_not(release: str) -> str:
    """Return why there is no pyslurm of the release; "" if there is one now (built if needed)."""
    if release != pyslurm_root.RELEASE:
        return _WHY_NOT.get(release, f"no pyslurm of {release} is built")
    try:
        pyslurm_root.build(pyslurm_root.ROOT, pyslurm_root.SOURCE)
    except (LabError, OSError) as error:
        return f"{error}"
    return ""


def contract() -> float:
    """Return how long pyslurm's half of the contract takes. Raises BenchError."""
    argv = [*pyslurm_root.CONTRACT, "-p", "no:cacheprovider", "-k", "pyslurm"]
    began = time.monotonic()
    done = pyslurm_root.run(pyslurm_root.ROOT, argv, quiet=True)
    took = time.monotonic() - began
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not re.search(r"\d passed", last) or "skipped" in last:
        raise BenchError(f"pyslurm's contract: {last}\n{(done.stderr + done.stdout)[-1500:]}")
    return took
