"""Saving in a real job: two nodes of a lab, one rank each, under robust-srun (root)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.common import REPOSITORY, BenchError
from lab import Cluster

NODES = 2
LIMIT = 1800.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"}


def run(nbytes: int, pairs: int, option: str) -> list[dict[str, Any]]:
    """Measure with ``bench.checkpoint.saving.driver`` in each rank, which replicates to its peer.

    ``option``: one of robust-srun's, or "".
    """
    with Cluster(nodes=NODES, standby=0) as lab:
        directory = lab.shared / "bench-checkpoint"
        directory.mkdir()
        os.chown(directory, lab.uid, lab.uid)
        output = directory / "output"
        driver = f"bench.checkpoint.saving.driver job {nbytes} {pairs} 1 {directory}"
        script = f"""#!/bin/bash
export PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1 ROBUST_STATE_DIR={directory}/state
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
exec robust-srun {option} python -m {driver}
"""
        size = [f"-N{NODES}", "--ntasks-per-node=1", "--no-kill"]
        job = lab.sbatch(script, [*size, "-o", str(output), "-D", str(directory)])
        state = lab.wait_job(job, ENDED, LIMIT)["JobState"]
        found = [path.read_text() for path in sorted(directory.glob("rank-*.json"))]
        if state != "COMPLETED" or len(found) != NODES:
            text = output.read_text(errors="replace")[-2000:] if output.exists() else "no output"
            raise BenchError(f"the job {state} with {len(found)} results:\n{text}")
        said = output.read_text(errors="replace")
    if "every step in memory" not in said:
        raise BenchError(f"robust-srun does not replicate:\n{said[-2000:]}")
    return [json.loads(text) for text in found]


def leave(directory: str, rank: int, found: dict[str, Any]) -> None:
    """In the rank: leave what was measured for ``run``."""
    Path(directory, f"rank-{rank}.json").write_text(json.dumps(found))
