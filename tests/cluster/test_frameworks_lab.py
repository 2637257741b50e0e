"""Lightning and transformers, two ranks (DDP) under robust-srun: killed, resumed from memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_jobs import undisturbed
from torch_forks import TorchForks

from lab import Cluster

STEPS = 9


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_ranks_killed(
    lab: Cluster, torch_forks: TorchForks, framework: str, tmp_path: Path
) -> None:
    """Within an epoch and at its end; all is as in a quiet run: losses, data, state."""
    pytest.importorskip(framework, reason="the extra 'frameworks' is not installed")
    training = undisturbed(torch_forks, f"fw_{framework}.py", tmp_path, 2, STEPS).job(lab)
    training.start("", "--kill=1:2:1,2:6:0", sbatch=["-N2", "--ntasks-per-node=1"], durable=False)
    training.check_ended()
    for record in training.check_lost(2):
        assert record["restored"], record
