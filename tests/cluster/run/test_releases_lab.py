"""The core set on the releases of Slurm that the other tests do not run on."""

from __future__ import annotations

import pytest
from jobs import start

from bench.releases import contract
from bench.releases.cells import gate_drain, requeue, site
from lab.slurm import pyslurm_root, releases

OTHERS = [name for name in releases.SUITES if name != releases.host_release()]


@pytest.mark.parametrize("release", OTHERS)
def test_the_core_of_a_release(release: str) -> None:
    """In one lab: a spare takes over, a job is requeued, the gate drains a node."""
    why = releases.why_not(release)
    if why:
        pytest.skip(f"Slurm {release} cannot be had here: {why}")
    with site(release) as lab:
        said = lab.exec("n1", ["srun", "--version"], check=True).stdout
        assert said.startswith(f"slurm-wlm {release}.")
        training = start(lab, 2, spares=1, toy="--hold 8", sbatch="-w n[1-3]")
        training.wait_step(8)
        lab.crash("n2")
        training.check_done()
        training.only_incident(
            action="swap_spare", suspects=["n2"], swaps=[["n2", "n3"]], outcome="recovered"
        )
        assert training.accusations()["n2"]["evidence"]
        lab.heal("n2")
        assert requeue(lab) > 0
        assert gate_drain(lab) > 0


def test_pyslurm_keeps_the_contract() -> None:
    if not pyslurm_root.ROOT.is_dir():
        pytest.skip("no pyslurm here: `make pyslurm` builds it once")
    assert contract.contract() > 0
