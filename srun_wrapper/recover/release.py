"""Nodes that leave the job: evicted from its ranks, then given back to Slurm."""

from __future__ import annotations

import asyncio

from robust_slurm.drain_reason import Reason
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.model import AgentKey, Role
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Finish, Stop
from srun_wrapper.recover.reports import Reports
from srun_wrapper.recover.standby.asking import StandbyRequests
from srun_wrapper.requeue.slurm_wait import Controller
from srun_wrapper.start_task import start_task


class Release:
    """Takes nodes out of the job."""

    def __init__(
        self,
        state: JobState,
        controller: Controller,
        reports: Reports,
        requests: StandbyRequests,
        journal: Journal,
    ) -> None:
        self._state = state
        self._members = state.members
        self._world = state.world
        self._bus = state.bus
        self._config = state.config
        self._slurm, self._wait = controller
        self._reports = reports
        self._requests = requests
        self._journal = journal
        self._released: set[str] = set()  # those that Slurm has back
        self._suspected: set[AgentKey] = set()  # alive, but to be evicted
        self._tasks: set[asyncio.Task[None]] = set()

    def evict(self, names: tuple[str, ...], incident: Incident) -> None:
        """Take nodes out of the job: no later epoch will use them."""
        for name in names:
            node = self._members.named(name)
            if node is None:
                continue
            if not node.gone:
                self._members.move(node, Role.EVICTED)
                self._suspected.add(node.key)
                self._bus.send(node, Stop(self._world.epoch, 0.0))
            self._reports.judge(node, incident)

    def reinstate(self, names: tuple[str, ...]) -> None:
        """Reinstate suspects that are alive and cannot be replaced; lost nodes cannot go on."""
        for node in self._world.places:  # not those whose place another one has by now
            if node.name in names and node.key in self._suspected and node.connection:
                self._suspected.discard(node.key)
                self._members.move(node, Role.ACTIVE)
                self._reports.stays(node.name)

    def release(self, incident: Incident) -> None:
        """Give the nodes that left back to Slurm, beside the running recovery."""
        self._reports.report_silent()
        gone = [n for n in self._state.nodes.values() if n.gone]
        for node in gone:
            self._bus.send(node, Finish(tuple((0, 0) for _ in range(node.slots))))
            self._requests.end(node.standby_request)
        names = [
            n.name
            for n in gone
            if not n.standby_request and n.name not in (self._state.own_node, *self._released)
        ]
        start_task(self._tasks, self._release(names, incident))

    async def _release(self, names: list[str], incident: Incident) -> None:
        if names:
            await self._wait.insist(
                f"release {','.join(names)} from the job (unused in it until then)",
                lambda: self._give_back(names),
            )
        if self._config.drain == "direct":
            await self._reports.flaps.over()  # a report that is withdrawn at once drains nobody
            await self._wait.insist("drain the bad node", lambda: self._drain(incident))

    def _give_back(self, names: list[str]) -> None:
        job = self._slurm.job(self._state.job_id)
        keep = [n for n in job.nodes if n not in names]
        if keep and len(keep) < len(job.nodes):
            self._slurm.shrink(self._state.job_id, keep)
            self._journal.event("released", nodes=[n for n in job.nodes if n in names])
        self._released.update(names)

    def _drain(self, incident: Incident) -> None:
        assert incident.plan is not None
        # The node gate's sweep takes the drain back when the node passes its checks.
        what = incident.diagnosis.symptom.replace("_", "-")
        for name in filter(self._reports.reported, incident.plan.replace):
            reason = Reason("node", what, "", "none", self._state.job_id)
            self._slurm.drain(name, reason.text)

    async def close(self) -> None:
        """End what runs in the background."""
        for task in list(self._tasks):
            if not task.done():
                await asyncio.wait([task], timeout=3.0)
            task.cancel()
