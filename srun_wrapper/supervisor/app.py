"""robust-srun: builds its parts, and runs them with its watches and signals beside its life."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from contextlib import suppress
from math import inf

from robust_slurm.config import Config
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.state_dir.ledger import JobLedger
from robust_slurm.text import counted
from srun_wrapper.checkpoints.flushing import ASK, Flushing
from srun_wrapper.checkpoints.registry import Checkpoints
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.checkpoints.stores import Stores
from srun_wrapper.code.deployment import Deployment
from srun_wrapper.command import steps
from srun_wrapper.detect.guard import TICK
from srun_wrapper.detect.hang_watch import HangWatch
from srun_wrapper.detect.launch_watch import LaunchWatch
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.detect.outage import OutsideHosts
from srun_wrapper.detect.slow_watch import SlowWatch
from srun_wrapper.detect.stalls import Stalls
from srun_wrapper.detect.watches import Watches
from srun_wrapper.job.facts import JobFacts
from srun_wrapper.job.reporting.job_records import JobRecords
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import ENDING, JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.orders.machine_tests import StopTests
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.protocol.messages import Message
from srun_wrapper.protocol.server import Connection, listen
from srun_wrapper.recover.code_updates import CodeUpdates
from srun_wrapper.recover.localization import FaultLocalization
from srun_wrapper.recover.lost_work import LostWork
from srun_wrapper.recover.nodes import NodeParts, node_parts
from srun_wrapper.recover.on_signal import SignalledRequeue
from srun_wrapper.recover.recovery import Recovery, Restoration
from srun_wrapper.recover.resize.growth import Growth
from srun_wrapper.recover.resize.standing import Standing
from srun_wrapper.recover.restarted import Restarted
from srun_wrapper.recover.settling import Settling
from srun_wrapper.recover.standby.request import Requester
from srun_wrapper.replay.replaying import Replay
from srun_wrapper.replay.small_worlds import SmallWorlds
from srun_wrapper.run_in_thread import run_in_thread
from srun_wrapper.signatures.catalogue import Catalogue
from srun_wrapper.start_task import start_task
from srun_wrapper.supervisor.epoch import Begun, Epochs
from srun_wrapper.supervisor.first_world import FirstWorld
from srun_wrapper.supervisor.inbox import Inbox
from srun_wrapper.supervisor.life import Finishing, Life
from srun_wrapper.supervisor.observing import Observing
from srun_wrapper.supervisor.step.again import AGAIN
from srun_wrapper.supervisor.step.attempts import Attempts
from srun_wrapper.supervisor.step.ending import Ending
from srun_wrapper.supervisor.step.real_step import RealStep
from srun_wrapper.supervisor.step.signals import StepSignals

NOTHING_RAN = 1.0  # s for shims to end that have had no rank; others may not even have started


class Supervisor:
    """Runs one robust-srun. ``run`` returns its exit code."""

    def __init__(
        self,
        config: Config,
        launch: steps.Launch,
        slurm: Slurm,
        catalogue: Catalogue | None = None,
        deployment: Deployment | None = None,
        attempts: Attempts | None = None,
    ) -> None:
        """``catalogue``: None: the built-in signatures; ``deployment``: None: code as it is;
        ``attempts``: earlier ones to start the step; None: this is the first."""
        self._attempts = attempts or Attempts()
        self.config = config
        self.launch = launch
        self.env = env = launch.env
        self.slurm = slurm
        job_id = int(env["SLURM_JOB_ID"])
        own = env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        self.state = state = JobState(config, job_id, own, catalogue)
        state.restarts = launch.options.restarts
        self.inbox = Inbox(state)
        self.ledger = JobLedger(launch.options.records, observes=bool(launch.observed))
        self.journal = Journal(self.ledger, config.verbose)
        state.on_news = self.journal.news
        state.on_spike = self.journal.spike
        state.on_counters = self.journal.counters
        self.code = CodeUpdates(state, deployment, self.ledger, self.journal)
        self.facts = JobFacts(launch, job_id, secrets.token_bytes(32))
        self._phase = Phase()
        self.records = JobRecords(state, self.ledger, self._phase, env)
        self.step = RealStep(state)
        self.outside_hosts = OutsideHosts()
        self.node_watch = NodeWatch(state, self.outside_hosts, self._shared_cause)
        self._beside: set[asyncio.Task[None]] = set()
        self.stalls = Stalls(
            state.members,
            state.changed,
            config.stall_limit,
            disturbed=lambda: self.node_watch.disturbed,
        )
        self.ending = Ending(state, self.node_watch.doubted)
        self.stopping = Stopping(state, self.stalls)
        self.topology = Topology(
            state.members,
            config,
            launch,
            self.journal,
            slurm.topology,
            lambda: self.checkpoints.enrolments.mesh(),
        )
        self.stop_tests = StopTests(
            state, self.facts, self.topology, self.journal, self._interrupted
        )
        worlds = SmallWorlds(state, self.stopping, self.facts, self.journal, self._interrupted)
        self.replay = Replay(state, worlds, self.topology)
        self._build_checkpoints()
        self.records.saved = self.checkpoints.record

    def _build_checkpoints(self) -> None:
        state, journal = self.state, self.journal
        checkpoints = self.checkpoints = Checkpoints(state, journal, self.topology.leaves)
        enrolments = checkpoints.enrolments
        certificates = self.certificates = checkpoints.certificates
        stores = Stores(state, enrolments, journal, self.ending.answers)
        self.restoring = Restoring(state, enrolments, certificates, stores, journal)
        self.epochs = Epochs(state, self.facts, self.restoring)
        gone = lambda: self.step.ended and not self.step.killed  # noqa: E731
        self.flushing = Flushing(state, enrolments, certificates, stores, gone)
        self.finishing = Finishing(
            state,
            self.step,
            self.flushing,
            self.ending,
            self.slurm,
            self._phase,
            self.launch.options,
        )
        checkpoints.on_enrolled = self.restoring.late_arrivals.enrolled
        state.on_store = checkpoints.heard
        self._growth_stands = Standing(state, enrolments, checkpoints.schedule)
        self.epochs.listeners += [
            lambda begun: checkpoints.new_epoch(begun.step, from_memory=begun.from_memory),
            self._note_epoch,
        ]

    def _build_recovery(self) -> NodeParts:
        """Build what needs the port that nodes connect to."""
        state = self.state
        ended = lambda: self.step.ended  # noqa: E731
        requester = Requester(self.launch, self._secrets, self.slurm, self.topology.prefer)
        nodes = self.nodes = node_parts(
            state,
            requester,
            self.ledger,
            self.journal,
            self.topology,
            self.node_watch,
            ended,
            lambda: self.checkpoints.replicas.copies,
            self.checkpoints.enrolments,
        )
        self.growth = Growth(state, nodes.resizing, self._growth_stands)
        self.epochs.listeners.append(lambda _begun: self.growth.begin())
        self.checkpoints.shared.on_acquitted = nodes.reports.withdraw
        self.first_world = FirstWorld(
            state,
            self.launch,
            self.finishing,
            self.topology,
            nodes.replacement,
            self._attempts,
            self.slurm,
        )
        settling = Settling(state, self.node_watch, nodes.prerequest.for_vacant, ended)
        recovery = Recovery(
            state,
            settling,
            FaultLocalization(
                state, self.stop_tests, self.replay, self.stopping.end_world, nodes.release.evict
            ),
            nodes,
            self.stopping,
            Restoration(self.restoring, self.flushing, self.certificates),
            Restarted(
                state,
                self._phase,
                lambda: self.restoring.step,
                lambda: self.checkpoints.resumed_in,
                ended,
                self.code.is_due,
                LostWork(state, self.launch.command.command),
            ),
            code=self.code,
            growth=self.growth,
            apart=self.launch.stderr_apart,
            kill_on_bad=self._kill_on_bad,
            phase=self._phase,
            journal=self.journal,
            record=self.records.incident,
            start_epoch=self.epochs.start,
        )
        watch = state, self.step, settling, nodes.means.now, self.journal, self.records.observed
        asked = SignalledRequeue(state, self.stopping, self.flushing, nodes.last_rung, self._phase)
        whole = state, recovery, self.finishing, self.ending, asked
        observes = self.launch.observed
        self._life: Life | Observing = Observing(*watch) if observes else Life(*whole)
        return nodes

    async def _kill_on_bad(self) -> bool:
        """Return whether srun would end the other tasks when one ends badly."""
        given = self.launch.kill_on_bad
        if given is None:
            with suppress(SlurmError, TimeoutError):
                config = await run_in_thread(self.slurm.config, ASK)
                given = int(config.get("KillOnBadExit") == "1")
        return bool(given)

    def _interrupted(self) -> bool:
        """True if a failure waits for its recovery, or the step is being ended."""
        return bool(self.state.failures) or self.state.signalled > 0 or self.step.ended

    # -- the whole life

    def _taken_in(self, connection: Connection, message: Message) -> None:
        self.node_watch.woken()
        self.inbox.message(connection, message)

    async def run(self) -> int:
        steps.raise_file_limit()
        server, port = await listen(self.facts.key, self._taken_in, self.inbox.closed)
        self._secrets = steps.Secrets(self.facts.key, port)
        StepSignals(self.state, self.step).catch(self.node_watch.continued)
        nodes = self._build_recovery()
        self.code.begin()
        watcher: asyncio.Task[None] | None = None
        try:
            await self._launch_step()
            missing = await self.first_world.wait_for_shims()
            if missing is None and not self.state.signalled:
                self.topology.learn()
                start_task(self._beside, self.outside_hosts.learn(self.slurm))
                missing = await self.first_world.form()
            if missing is not None or self.state.signalled:
                self._phase.name = self._last_phase(missing or 0)
                self.finishing.dismiss()
                await self.step.end(patience=NOTHING_RAN)
                return missing or 128 + self.state.signalled
            watcher = asyncio.create_task(self._build_watches().run())
            if await self.restoring.prepare():
                self.epochs.start("")
            code = await self._life.run()
            if code != AGAIN and self._phase.name not in ("failed", "requeued", "cancelled"):
                self._phase.name = self._last_phase(code)
            return code
        finally:
            for task in (watcher, *self._beside):
                if task is not None:
                    task.cancel()
            self.topology.close()
            self.code.close()
            await nodes.close(lambda: self.state.signalled > 0)
            await self.step.end()
            server.close()
            self.inbox.warnings.look(inf)
            self.records.close()
            if lost := self.ledger.dropped:
                say(f"{counted(lost, 'record')} not written: {self.ledger.error}")

    def _last_phase(self, code: int) -> str:
        """Return the job's last state, as robust-status shows it."""
        if self.state.signalled in ENDING:
            return "cancelled"
        return "failed" if code else "completed"

    async def _launch_step(self) -> None:
        argv = steps.step_argv(self.launch, self.config.task_python)
        env = {**self.env, **self._secrets.env()}
        await self.step.start(argv, env, own_session=not self.launch.options.inherit)

    def _note_epoch(self, begun: Begun) -> None:
        epoch, places = self.state.world.epoch, self.state.world.places
        self.ledger.event("epoch", epoch=epoch, nodes=[n.name for n in places], why=begun.reason)
        self.records.chronicle.world()
        if self._phase.name != "recovering":
            self._phase.name = "running"

    def _shared_cause(self, text: str, begins: bool) -> None:
        self.ledger.event("shared_cause", text=text)
        say(text)
        if begins:
            start_task(self._beside, self._name_shared_cause())

    async def _name_shared_cause(self) -> None:
        if found := await self.outside_hosts.missing(self.slurm):
            say(f"seen from {self.state.own_node}: {'; '.join(found)}")

    def _excused(self) -> bool:
        return self.stalls.standing() or self.growth.held_up or self._life.standing_still()

    def _build_watches(self) -> Watches:
        state, excused = self.state, self._excused
        launch = LaunchWatch(state, say, self._disturbed)
        tell = self.journal.located, self.journal.looked_closer
        hindered = lambda: self.nodes.means.now().hindered  # noqa: E731
        hang = HangWatch(state, excused, self.topology.mesh, *tell, hindered)
        slowness = self.nodes.slowness
        slow = SlowWatch(state, excused, slowness.found, slowness.eased)
        always = (
            self.node_watch.look,
            self.ending.look,
            self.stalls.look,
            self.nodes.needed.look,
            self.code.look,
            self.records.look,
            self.inbox.warnings.look,
        )
        stepping = (
            launch.look,
            hang.look,
            slow.look,
            self.checkpoints.look,
            self.certificates.look,
            self.growth.look,
            self.nodes.prerequest.for_doubtful,
            self.nodes.leases.look,
        )
        return Watches(state, always, stepping, say)

    def _disturbed(self) -> bool:
        """Return whether nodes are held up by what they share, or have just been."""
        return self.stalls.standing() or time.monotonic() - self.node_watch.disturbed < TICK * 5
