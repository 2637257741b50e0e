"""Build the parts that take nodes out of the job and bring others in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.decide.bounds import Copies
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.model import Node
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.recover.last_rung import LastRung
from srun_wrapper.recover.means import AvailableMeans
from srun_wrapper.recover.release import Release
from srun_wrapper.recover.replace import Replacement
from srun_wrapper.recover.reports import Reports
from srun_wrapper.recover.resize.resizing import Resizing
from srun_wrapper.recover.slowness import Slowness
from srun_wrapper.recover.standby.asking import StandbyRequests
from srun_wrapper.recover.standby.leases import Leases
from srun_wrapper.recover.standby.needed import Lack, NeededFiles, tell_passed_over
from srun_wrapper.recover.standby.nodes import StandbyNodes
from srun_wrapper.recover.standby.prerequest import Prerequest
from srun_wrapper.recover.standby.request import Requester
from srun_wrapper.requeue.slurm_wait import Controller, SlurmWait


class NodeParts(NamedTuple):
    """Parts of the supervisor, each of which does one thing to the job's nodes."""

    means: AvailableMeans
    reports: Reports
    release: Release
    requests: StandbyRequests
    prerequest: Prerequest
    leases: Leases
    replacement: Replacement
    needed: NeededFiles
    last_rung: LastRung
    slowness: Slowness
    resizing: Resizing

    async def close(self, hurried: Callable[[], bool]) -> None:
        """End all standby nodes, and what runs in the background; ``hurried``: see ``Flaps``."""
        await self.needed.close()
        await self.leases.close()
        await self.requests.close()
        await self.reports.flaps.close(hurried)
        await self.release.close()


def node_parts(
    state: JobState,
    requester: Requester,
    ledger: JobLedger,
    journal: Journal,
    topology: Topology,
    node_watch: NodeWatch,
    ended: Callable[[], bool],
    copies: Callable[[], Copies],
    enrolments: Enrolments,
) -> NodeParts:
    """Build the parts; ``ended``: True if the job's srun has ended; ``copies``: see ``Means``."""

    def ending() -> bool:
        return state.signalled > 0 or ended()

    def over() -> bool:
        return state.ending or ending()

    def interrupted() -> bool:
        return bool(state.failures) or ending()

    launch, config, members = requester.launch, state.config, state.members
    controller = Controller(requester.slurm, SlurmWait(config.slurm_wait, over, say))
    reports = Reports(state.nodes, ledger, launch.env.get("SLURM_JOB_USER", ""))
    state.on_back = reports.came_back
    requests = StandbyRequests(state, requester, controller.wait, journal, reports.barred)

    def lacking(node: Node, lack: Lack) -> None:
        tell_passed_over(node.name, lack.text)
        journal.event("passed_over", node=node.name, why=lack.text)
        requests.unfit.note_lacking(node.name, node.job_id, lack.text, certain=lack.certain)
        if node.standby_request:
            requests.drop(node.standby_request)

    needed = NeededFiles(
        state,
        launch.command.command,
        launch.options.records,
        lambda: replacement.just_joined(),
        lacking,
    )
    standby = StandbyNodes(state, requests, interrupted, needed.known)
    resizing = Resizing(state, enrolments, launch, journal, topology.mesh, requests.use)
    means = AvailableMeans(state, launch, reports, copies, resizing)
    allowed = lambda: means.now().standby_nodes > 0  # noqa: E731
    replacement = Replacement(
        members, standby, topology, reports, lambda: bool(state.failures) or over(), resizing
    )
    return NodeParts(
        means,
        reports,
        Release(state, controller, reports, requests, journal),
        requests,
        Prerequest(members, requests, node_watch, ending, lambda: resizing.wanted),
        Leases(state, requests, requester, reports.barred, journal, allowed),
        replacement,
        needed,
        LastRung(state, launch, controller, reports, ledger),
        Slowness(state, ledger, reports),
        resizing,
    )
