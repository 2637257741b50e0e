"""Which node takes which lost one's place: the one that spreads the job's groups least.

The decision is ``standby.choose``; here is what it is asked with: the network as Slurm knows it,
and the mesh as the training's Checkpointer has told it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from robust_slurm.slurm import SlurmError
from srun_wrapper.aside import aside
from standby.choose import choose
from standby.topology import minipods

if TYPE_CHECKING:
    from srun_wrapper.supervisor import Supervisor

PATIENCE = 10.0  # s for Slurm to say how nodes are connected


class Neighbours:
    """Without a topology all nodes are alike, and nothing is preferred."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._boss = supervisor
        self._minipods: dict[str, str] = {}
        self._learning: asyncio.Task[None] | None = None

    def learn(self) -> None:
        """Beside the start of the job."""
        self._learning = asyncio.create_task(self._learn())

    async def _learn(self) -> None:
        try:
            self._minipods = minipods(await aside(self._boss.slurm.topology, PATIENCE))
        except (SlurmError, OSError, ValueError, TimeoutError) as err:
            self._boss.news(f"no topology: {err}")

    def prefer(self, lost: Sequence[str], candidates: Sequence[str]) -> dict[str, str]:
        """Lost node → candidate. Empty where nothing speaks for one or another."""
        world = self._boss.state.world
        if len({self._minipods.get(name) for name in candidates}) < 2:
            return {}
        places = [node.name for node in world.places]
        mesh = self._boss.checkpoints.mesh()
        try:
            return dict(choose(lost, candidates, places, mesh, world.ranks, self._minipods))
        except ValueError as err:
            self._boss.news(f"no choice by topology: {err}")
            return {}

    def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
