"""Ranks that read their input through srun: nothing of it is lost at a restart."""

from __future__ import annotations

from jobs import prepared

from lab import Cluster

READER = """
import os, signal, sys
rank, epoch = os.environ["SLURM_PROCID"], os.environ["ROBUST_EPOCH"]
seen = []
for line in sys.stdin:
    seen.append(line.strip())
    if rank == "1" and epoch == "1" and len(seen) == 20:
        os.kill(os.getpid(), signal.SIGKILL)
with open(f"seen.{rank}", "w") as file:
    file.write(" ".join(seen))
"""


def test_input_through_a_pipe_is_read_again(lab: Cluster) -> None:
    training = prepared(lab, 2)
    (training.dir / "reader.py").write_text(READER)
    training.submit("seq 1 100 | robust-srun python reader.py", ["-N2", "--ntasks-per-node=1"])
    assert training.wait_end() == 0, training.story()
    expected = " ".join(map(str, range(1, 101)))
    assert [(training.dir / f"seen.{rank}").read_text() for rank in (0, 1)] == [expected] * 2
    assert len(training.incidents()) == 1
