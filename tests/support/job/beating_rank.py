"""A rank in a real process, and what it has beaten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import robust_slurm
from robust_slurm.record import Beat, BeatReader, record_path

PACKAGE = Path(robust_slurm.__file__).parent


def run(code: str, directory: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` as a rank of epoch 0, local rank 0, and insist that it ends well."""
    full = {k: v for k, v in os.environ.items() if not k.startswith(("ROBUST_", "SLURM_"))}
    full |= {"PYTHONPATH": str(PACKAGE.parent), "LOCAL_RANK": "0", "RANK": "6"}
    if directory is not None:
        full["ROBUST_BEAT_DIR"] = str(directory)
    full |= env
    done = subprocess.run(
        [sys.executable, "-c", "import robust_slurm as r\n" + code],
        env=full, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def read(directory: Path, epoch: int = 0, local_rank: int = 0) -> Beat:
    beat = BeatReader(record_path(str(directory), epoch, local_rank)).read()
    assert beat is not None
    return beat
