"""Gates in processes of their own that close at the same moment: the breaker's limit holds."""

from __future__ import annotations

import os
import time

import breaker_site
import pytest
from breaker_site import BreakerSite

from health.gate import slurms_records

own_path, patience, site = breaker_site.own_path, breaker_site.patience, breaker_site.site
GATES = 4


def close_all(site: BreakerSite, ledger: set[int]) -> None:
    """Drain each node in its own process, by the ledger or by Slurm's records alone."""
    children = []
    for number in range(1, GATES + 1):
        pid = os.fork()
        if pid == 0:
            try:
                site.pause = time.sleep
                has = number in ledger
                site.drain(f"n{number}", job=number, ledger=has, seconds=40.0, max_nodes=1)
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("ledger", "looks"),
    [
        pytest.param(set(), 1 << 30, id="no ledger"),
        # A gate takes back a drain that it cannot see any more.
        pytest.param(set(), GATES, id="no ledger, and slurmctld shows all nodes once"),
        # Gates without a ledger give way to gates with one: neither sees what the others ask for.
        pytest.param({1, 2}, 1 << 30, id="half of them have no answer from the ledger"),
    ],
)
def test_the_limit_holds(
    site: BreakerSite, monkeypatch: pytest.MonkeyPatch, ledger: set[int], looks: int
) -> None:
    monkeypatch.setattr(slurms_records, "SPREAD_S", 0.0)  # all look at the same moment
    site.slurm.answer_looks(looks)
    close_all(site, ledger)
    assert len(site.slurm.drained) <= 1
    assert site.slurm.drained or looks == GATES, "Slurm's records are enough for one drain"
