"""Observe mode as a whole: robust-srun, its shims and ranks, with a stand-in for srun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from srun_here import JOB, Step

pytestmark = pytest.mark.slow
RANK = """
echo "rank $SLURM_PROCID [$RANK$WORLD_SIZE$MASTER_ADDR] $SLURM_JOB_NODELIST $SLURM_NTASKS_PER_NODE"
[ $SLURM_PROCID = 1 ] && exit 5
sleep %s
echo "end $SLURM_PROCID"
"""


def incidents(step: Step) -> list[dict[str, Any]]:
    path = step.state / "jobs" / str(JOB) / "incidents.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("kill", [False, True])
def test_a_rank_that_fails_is_reported_and_the_step_ends_as_sruns(
    tmp_path: Path, kill: bool
) -> None:
    """The others go on to their end; with ``-K`` they end at once. No rank starts again."""
    script = tmp_path / "rank.sh"
    script.write_text(RANK % (60 if kill else 1.5))
    step = Step(tmp_path, 3)
    words = ["--robust=observe", *(["-K"] if kill else []), "bash", str(script)]
    # The variables that srun has set stay, also where a world of our own would have others.
    step.start(tmp_path, *words, SLURM_JOB_NODELIST="n[1-9]", SLURM_NTASKS_PER_NODE="8")
    step.until(step.ended, "its end", 60.0)
    assert step.close() == 5, step.said()
    said = step.said()
    assert sorted(line for line in said.splitlines() if line.startswith("rank")) == [
        f"rank {number} [] n[1-9] 8" for number in range(3)
    ]
    assert ("end 0" in said and "end 2" in said) is not kill
    assert said.count("nothing was done (--robust=observe)") == 1
    [record] = incidents(step)
    assert record["outcome"] == "observed: would restart all ranks in place"
    assert not list(step.state.rglob("accusations/*"))
