"""A job on one node that ends when the test says so, and what the node noted of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_lab import GateLab, gate_lab
from jobs import Training, prepared
from waiting import until

from health.node.system import Event

# Ends when the test has put into place what the user wants to say.
WAITS = """#!/bin/sh
touch $HOME/$SLURM_JOB_ID.started
while [ ! -e $HOME/$SLURM_JOB_ID.end ]; do sleep 0.05; done
"""


@pytest.fixture(scope="module")
def made() -> Iterator[GateLab]:
    with gate_lab(nodes=3) as site:
        yield site


@pytest.fixture
def site(made: GateLab) -> Iterator[GateLab]:
    """All nodes well, and none is a lemon for what the tests before have reported."""
    made.settings(more="[lemon]\nstrikes = 100\n")
    yield made
    made.mend()


class SiteTraining(Training):
    """One whose records lie in the site's state directory."""

    @property
    def state(self) -> Path:
        return self.lab.spec.dir / "site" / "state"


def site_training(site: GateLab) -> SiteTraining:
    """A training of two ranks that is not started yet."""
    plain = prepared(site.lab, world=2)
    return SiteTraining(plain.lab, plain.dir, plain.world, plain.steps)


def begin(site: GateLab, node: str) -> int:
    job = site.submit(f"-w{node}", script=WAITS)
    until((site.lab.shared / f"{job}.started").exists, f"job {job} running")
    return job


def finish(site: GateLab, job: int) -> None:
    (site.lab.shared / f"{job}.end").touch()
    site.ended(job)


def of(site: GateLab, node: str, job: int, kind: str) -> list[Event]:
    return [event for event in site.local(node, kind) if event.data["job"] == job]
