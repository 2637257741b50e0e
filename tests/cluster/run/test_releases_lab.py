"""The core set on the releases of Slurm that the other tests do not run on."""

from __future__ import annotations

import pytest
from jobs import start

from lab import Cluster
from lab.slurm import releases

OTHERS = [name for name in releases.SUITES if name != releases.host_release()]


@pytest.mark.parametrize("release", OTHERS)
def test_a_spare_takes_over(release: str) -> None:
    why = releases.why_not(release)
    if why:
        pytest.skip(f"Slurm {release} cannot be had here: {why}")
    with Cluster(nodes=3, standby=0, slurm=release) as lab:
        said = lab.exec("n1", ["srun", "--version"], check=True).stdout
        assert said.startswith(f"slurm-wlm {release}.")
        training = start(lab, 2, spares=1, toy="--hold 8")
        training.wait_step(8)
        lab.crash("n2")
        training.check_done()
        training.only_incident(
            action="swap_spare", suspects=["n2"], swaps=[["n2", "n3"]], outcome="recovered"
        )
        assert training.accusations()["n2"]["evidence"]
