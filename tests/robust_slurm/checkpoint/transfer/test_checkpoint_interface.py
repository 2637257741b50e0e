"""Snapshots go over the network that the site names."""

from __future__ import annotations

import asyncio

import pytest
from checkpointed_job import CheckpointedJob, settled

from robust_slurm.checkpoint.transfer import interface
from srun_wrapper.protocol.checkpoint_messages import ReplicaTargets, StoreReady


def test_the_address_of_an_interface() -> None:
    assert interface.address("lo") == "127.0.0.1"


@pytest.mark.parametrize("name", ["none7", "x" * 40])
def test_an_interface_that_is_not_there(name: str) -> None:
    with pytest.raises(OSError):
        interface.address(name)


def test_replicas_go_to_the_address_that_a_node_has_named() -> None:
    async def run() -> CheckpointedJob:
        job = CheckpointedJob()
        for rank in range(4):
            job.enrol(rank)
        job.checkpoints.heard(job.nodes[1], StoreReady(9, 0, 8001, "10.9.0.1"))
        await settled(job)
        return job

    job = asyncio.run(run())
    places = [message for _, message in job.sent if isinstance(message, ReplicaTargets)]
    hosts = {t.node: t.host for place in places for t in place.targets.values() if t}
    assert hosts == {"n0": "10.0.0.0", "n1": "10.9.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
