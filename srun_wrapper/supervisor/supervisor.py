"""robust-srun's main loop: launch, watch, recover, end.

Observations come in through JobState (messages) and the watches; ``diagnose`` and ``ladder``
decide; ``recovery`` and ``replace`` do what was decided.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from robust_slurm.config import Config
from robust_slurm.ledger import JobLedger
from robust_slurm.slurm import Slurm, SlurmError
from srun_wrapper.checkpoints import flushing
from srun_wrapper.checkpoints.flushing import Flushing
from srun_wrapper.checkpoints.registry import Checkpoints
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.checkpoints.stores import Stores
from srun_wrapper.checkpoints.verify.check import Check
from srun_wrapper.checkpoints.verify.machine_verdict import MachineVerdict
from srun_wrapper.checkpoints.verify.recomputing import Recomputing
from srun_wrapper.checkpoints.verify.rules import ONE_NODE
from srun_wrapper.checkpoints.verify.standing import Standing
from srun_wrapper.checkpoints.verify.verifying import Verify
from srun_wrapper.command import steps
from srun_wrapper.command.torchrun import restarts_itself
from srun_wrapper.decide import ladder
from srun_wrapper.decide.incident import Incident
from srun_wrapper.detect.launch_watch import LaunchWatch
from srun_wrapper.detect.outage import OutsideHosts
from srun_wrapper.detect.stalls import Stalls
from srun_wrapper.detect.watch import TICK, Guard, HangWatch, NodeWatch
from srun_wrapper.protocol.messages import Message, Signal
from srun_wrapper.protocol.server import Connection, listen
from srun_wrapper.recover.localization import FaultLocalization
from srun_wrapper.recover.machine_tests import StopTests
from srun_wrapper.recover.nodes import NodeParts, node_parts
from srun_wrapper.recover.recovery import End, Recovery, Restoration
from srun_wrapper.recover.restarted import Restarted
from srun_wrapper.recover.settling import Settling
from srun_wrapper.recover.standby.request import Requester
from srun_wrapper.recover.stopping import Stopping
from srun_wrapper.replay.replaying import Replay
from srun_wrapper.replay.small_worlds import Asked, SmallWorlds
from srun_wrapper.supervisor.aside import aside
from srun_wrapper.supervisor.ending import Ending
from srun_wrapper.supervisor.epoch import Begun, Epochs
from srun_wrapper.supervisor.facts import JobFacts
from srun_wrapper.supervisor.inbox import Inbox
from srun_wrapper.supervisor.journal import Journal
from srun_wrapper.supervisor.model import Node, Role, first_places
from srun_wrapper.supervisor.orders import finish_order
from srun_wrapper.supervisor.phase import Phase
from srun_wrapper.supervisor.real_step import RealStep
from srun_wrapper.supervisor.report import Account, roster, say
from srun_wrapper.supervisor.state import ENDING, JobState
from srun_wrapper.supervisor.topology import Topology

NOTHING_RAN = 1.0  # s for shims to end that have had no rank; others may not even have started
BAD_SIZE = 2  # exit code, as for other bad input
FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGQUIT)
TERMINATING = (signal.SIGINT, signal.SIGTERM)
_log = logging.getLogger("robust-srun.supervisor")


class Supervisor:
    """Runs one robust-srun. ``run`` returns its exit code."""

    def __init__(
        self,
        config: Config,
        launch: steps.Launch,
        slurm: Slurm,
    ) -> None:
        self.config = config
        self.launch = launch
        self.env = env = launch.env
        self.slurm = slurm
        job_id = int(env["SLURM_JOB_ID"])
        own = env.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]
        self.state = JobState(config, job_id, own)
        self.state.on_news = self.news
        self.inbox = Inbox(self.state)
        self.bus = self.state.bus
        self.ledger = JobLedger(launch.options.records)
        self.journal = Journal(self.ledger, config.verbose)
        self.facts = JobFacts(launch, job_id, secrets.token_bytes(32))
        self._phase = Phase()
        self.account = Account()
        self.step = RealStep(self.state)
        self._interrupts: list[float] = []
        self._next_roster = 0.0
        self.outside_hosts = OutsideHosts()
        self.node_watch = NodeWatch(self.state, self.outside_hosts, self._shared_cause)
        self._beside: set[asyncio.Task[None]] = set()
        self.stalls = Stalls(self.state, disturbed=lambda: self.node_watch.disturbed)
        self.ending = Ending(self.state, self.node_watch.doubted)
        self.stopping = Stopping(self.state, self.bus, self.stalls)
        self.topology = Topology(
            self.state,
            launch,
            self.journal,
            slurm.topology,
            lambda: self.checkpoints.enrolments.mesh(),
        )
        self.stop_tests = StopTests(
            self.state, self.bus, self.facts, self.topology, self.journal, self._interrupted
        )
        worlds = SmallWorlds(
            self.state, self.bus, self.stopping, self.facts, self.journal, self._interrupted
        )
        how = (config.replay, config.replay_limit, config.replay_rounds, config.replay_fixed)
        self.replay = Replay(Asked(*how), self.state, worlds, self.topology)
        self._build_checkpoints()

    def _build_checkpoints(self) -> None:
        state, bus, journal = self.state, self.bus, self.journal
        checkpoints = self.checkpoints = Checkpoints(state, bus, journal, self.topology.leaves)
        enrolments = checkpoints.enrolments
        certificates = self.certificates = checkpoints.certificates
        stores = Stores(state, bus, enrolments, journal, self.ending.answers)
        self.restoring = Restoring(state, enrolments, certificates, stores, journal)
        self.epochs = Epochs(state, self.facts, self.restoring)
        self.flushing = Flushing(state, enrolments, certificates, stores, lambda: self.step.ended)
        checkpoints.on_enrolled = self.restoring.late_arrivals.enrolled
        state.on_store = checkpoints.heard
        standing = Standing(state, bus, enrolments, checkpoints.schedule)
        recomputing = Recomputing(
            state,
            standing,
            stores,
            self.restoring,
            self.stopping,
            journal,
            pod=self.topology.pod,
            start_epoch=self.epochs.start,
            interrupted=self._interrupted,
        )
        verdict = MachineVerdict(
            state,
            self.stop_tests.ask,
            lambda names, incident: self.nodes.release.evict(names, incident),
        )
        check = Check(state, recomputing, verdict, certificates, journal)
        self.verify = Verify(state, standing, recomputing, check, journal, self._phase)
        self.epochs.listeners += [
            lambda begun: checkpoints.new_epoch(begun.step, from_memory=begun.from_memory),
            lambda _begun: self.verify.begin(),
            self._note_epoch,
        ]

    def _build_recovery(self) -> NodeParts:
        """Build what needs the port that nodes connect to."""
        state = self.state

        def ended() -> bool:
            return self.step.ended

        requester = Requester(self.launch, self._secrets, self.slurm, self.topology.prefer)
        nodes = self.nodes = node_parts(
            state,
            requester,
            self.ledger,
            self.journal,
            self.topology,
            self.node_watch,
            ended,
        )
        self._recovery = Recovery(
            state,
            Settling(state, self.node_watch, nodes.prerequest.for_vacant, ended),
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
            ),
            phase=self._phase,
            journal=self.journal,
            record=self._record,
            start_epoch=self.epochs.start,
        )
        return nodes

    def _record(self, incident: Incident) -> None:
        """Account for an incident that is over."""
        self.account.incident(incident, self.state.pace.step_time())
        self.ledger.incident(incident.record(self.state.job_id, self.state.step_id))
        self.write_roster()

    def _interrupted(self) -> bool:
        """True if a failure waits for its recovery, or the step is being ended."""
        return bool(self.state.failures) or self.state.signalled > 0 or self.step.ended

    # -- the whole life

    async def run(self) -> int:
        steps.raise_file_limit()
        server, port = await listen(self.facts.key, self._message, self.inbox.closed)
        self._secrets = steps.Secrets(self.facts.key, port)
        self._catch_signals()
        nodes = self._build_recovery()
        watcher: asyncio.Task[None] | None = None
        try:
            await self._launch_step()
            missing = await self._wait_for_shims()
            if missing is None and not self.state.signalled:
                self.topology.learn()
                self._start_beside(self.outside_hosts.learn(self.slurm))
                missing = await self._first_world()
            if missing is not None or self.state.signalled:
                self.phase = self._last_phase(missing or 0)
                self._dismiss()
                await self.step.end(patience=NOTHING_RAN)
                return missing or 128 + self.state.signalled
            watcher = asyncio.create_task(self._watch())
            if await self.restoring.prepare():
                self.epochs.start("")
            code = await self._life()
            if self.phase not in ("failed", "requeued", "cancelled"):
                self.phase = self._last_phase(code)
            return code
        finally:
            for task in (watcher, *self._beside):
                if task is not None:
                    task.cancel()
            self.topology.close()
            await nodes.close()
            await self.step.end()
            server.close()
            self.write_roster()
            self.ledger.close()
            if self.ledger.dropped:
                say(f"{self.ledger.dropped} records were not written: {self.ledger.error}")

    @property
    def phase(self) -> str:
        """The job's state, as robust-status shows it."""
        return self._phase.name

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase.name = phase

    def _last_phase(self, code: int) -> str:
        """Return the job's last state, as robust-status shows it."""
        if self.state.signalled in ENDING:
            return "cancelled"
        return "failed" if code else "completed"

    async def _life(self) -> int:
        state = self.state
        while True:
            await state.until(self._something_to_do, None)
            ended = state.world.all_exited() and not (state.failures or state.stopped())
            if state.signalled or ended:
                return await self.finish()
            if self.step.ended and not state.failures:
                await asyncio.sleep(1.0)
                if not state.failures:
                    return await self.step_ended()
            if self.verify.ready and not state.failures and not state.stopped():
                await self.verify.run()
                continue
            end = await self._recovery.handle()
            if end is not None:
                return await self._end(end)

    async def _end(self, end: End) -> int:
        """Carry out what a recovery came to."""
        if end.code is None:
            return await self.step_ended()
        await self.finish()
        return end.code

    def _something_to_do(self) -> bool:
        state = self.state
        if state.signalled:
            stopped = state.stopped()
            done = state.world.all_exited() or self.ending.over
            return stopped or done or self.step.ended
        due = bool(state.failures) or state.stopped() or self.verify.ready
        return due or state.world.all_exited() or self.step.ended

    # -- start

    async def _launch_step(self) -> None:
        argv = steps.main_argv(self.launch.plan.apply(self.launch.command), self.env)
        argv += steps.task_argv(
            self.config.task_python, self.launch.options, self.launch.command.command
        )
        env = {**self.env, **self._secrets.env()}
        await self.step.start(argv, env, own_session=not self.launch.options.inherit)

    async def _wait_for_shims(self) -> int | None:
        """Wait until every node of the step has reported; an exit code if it never will.

        Not when the step is to end: some may have died of the signal before they could report.
        """
        state = self.state
        await state.until(lambda: bool(state.nodes) or self.step.ended, None)

        def complete() -> bool:
            wanted = next(iter(state.nodes.values())).hello.step_nodes if state.nodes else 1
            return len(state.nodes) >= wanted or self.step.ended or state.signalled > 0

        await state.until(complete, self.config.task_start_limit)
        if self.step.ended:
            code = self.step.code or 1
            say(f"srun could not start the step (exit code {code}); its message is above")
            return code
        wanted = next(iter(state.nodes.values())).hello.step_nodes
        plan = self.launch.plan
        needed = plan.active_nodes - plan.short if plan.active_nodes is not None else wanted
        if len(state.nodes) < needed and not state.signalled:
            limit = self.config.task_start_limit
            say(
                f"{wanted - len(state.nodes)} of {wanted} nodes did not start robust-task within "
                f"{limit:g} s, {needed} are needed; if they are only slow, raise task_start_limit, "
                "else look at slurmd's log on the nodes missing from: "
                f"{', '.join(n.name for n in state.nodes.values())}"
            )
            return ladder.NOTHING_LEFT
        return None

    async def _first_world(self) -> int | None:
        """Give the places to nodes; an exit code if there are too few."""
        state = self.state
        if short := self.launch.plan.short:
            came = await self.nodes.replacement.reinforce(
                short, self.launch.plan.slots_per_node or 1
            )
            if state.signalled:
                return None
            if self.step.ended:
                return await self.step_ended()
            if len(came) < short:
                say(f"{short} of the nodes released by an earlier step could not be replaced")
                return ladder.NOTHING_LEFT
            names = ", ".join(node.name for node in came)
            say(f"{names} replaced what an earlier step of this job released")
        nodes, planned = list(state.nodes.values()), self.launch.plan.ranks_per_active_node
        try:
            places, ranks = first_places(nodes, planned)
        except LookupError as err:
            say(str(err.args[0]))
            return ladder.NOTHING_LEFT
        except ValueError as err:
            say(str(err))
            return BAD_SIZE
        if self.config.verify_every and len(places) + len(state.spares()) < 2:
            say(f"error: --robust-verify-every: {ONE_NODE}")
            return BAD_SIZE
        state.members.lay_out(places, ranks)
        await self.topology.arrange_first()
        for node in state.world.places:
            state.members.move(node, Role.ACTIVE)
        asked = restarts_itself(self.launch.command.command, self.env)
        if asked and self.config.rank_env and all(len(numbers) == 1 for numbers in ranks):
            say(f"torchrun's --max-restarts={asked} is set to 0: robust-srun restarts its ranks")
        if self.config.verbose or state.spares():
            spare = ", ".join(n.name for n in state.spares()) or "none"
            say(f"{len(places)} nodes, {state.world.size} ranks, spares: {spare}")
        return None

    # -- an epoch

    def _note_epoch(self, begun: Begun) -> None:
        world = self.state.world
        names = [n.name for n in world.places]
        self.ledger.event("epoch", epoch=world.epoch, nodes=names, why=begun.reason)
        if self.phase not in ("recovering", "checking"):
            self.phase = "running"

    # -- the end

    async def step_ended(self) -> int:
        """The step ended although ranks should be running: someone cancelled it."""
        self.phase = "cancelled"
        for node in self.state.world.places:
            if node.role is Role.DEAD and node.refused:  # its shim went with the step
                self.state.members.move(node, Role.RELEASED)
        self._dismiss()  # companions, whose steps are others
        await self.step.end(self._swapped())
        code = self.step.code or 128 + signal.SIGKILL
        if self.step.code == 0:
            say(f"srun ended with 0 although ranks were still running; exit code {code}")
        else:
            say(f"Slurm ended the step (exit code {code})")
        return code

    async def finish(self) -> int:
        """Let every shim end like its rank; returns the step's exit code as srun computes it."""
        state = self.state
        await self.flushing.flush(await self._time_to_flush())
        silent = self.ending.silent if state.signalled else []
        if silent:
            self._dismiss([n for n in state.live() if self.ending.answers(n)])
            silent = await self.ending.wait_for_silent(lambda: self.step.ended)
        self._dismiss()
        codes = [
            128 + r.exit[1] if r.exit[1] else r.exit[0]
            for r in state.world.by_rank.values()
            if r.exit is not None
        ]
        swapped = self._swapped()
        await self.step.end(swapped, silent=silent)
        if not swapped and self.step.code is not None:
            return self.step.code
        if state.signalled and not any(codes):
            return 128 + state.signalled
        return max(codes, default=0)

    async def _time_to_flush(self) -> float:
        """Seconds for the last durable checkpoint: of a job that is ended, part of KillWait."""
        if not self.state.signalled or not self.flushing.needed:
            return flushing.END
        try:
            config = await aside(self.slurm.config, flushing.ASK)
            wait = float(config["KillWait"].split()[0])
        except (SlurmError, TimeoutError, LookupError, ValueError):
            return flushing.SIGNALLED
        return min(flushing.SIGNALLED, flushing.OF_KILL_WAIT * wait)

    def _dismiss(self, nodes: Iterable[Node] | None = None) -> None:
        """Tell the shims of these nodes (None: all, later ones included) to end."""
        self.state.ending = True
        for node in self.state.nodes.values() if nodes is None else nodes:
            self.bus.send(node, finish_order(self.state.world, node))

    def _swapped(self) -> bool:
        return any(n.gone or n.companion for n in self.state.nodes.values())

    # -- signals

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            loop.add_signal_handler(signum, self._forward, signum)
        for signum in TERMINATING:
            loop.add_signal_handler(signum, self._terminate, signum)
        loop.add_signal_handler(signal.SIGCONT, self.node_watch.continued)

    def _forward(self, signum: int) -> None:
        self.state.pass_on(signum)
        self.bus.broadcast(Signal(signum))

    def _terminate(self, signum: int) -> None:
        """As srun does: pass it on; a second Ctrl-C within a second ends the step."""
        now = time.monotonic()
        self._interrupts = [t for t in self._interrupts if now - t < 1.0] + [now]
        self.state.signalled = signum
        if not self.state.nodes:
            self.step.send_signal(signum)
        self.bus.broadcast(Signal(signum))
        if signum == signal.SIGINT and len(self._interrupts) > 1:
            self.bus.broadcast(Signal(signal.SIGKILL))
        self.state.changed.set()

    # -- beside the loop

    def _start_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _shared_cause(self, text: str, begins: bool) -> None:
        self.ledger.event("shared_cause", text=text)
        say(text)
        if begins:
            self._start_beside(self._name_shared_cause())

    async def _name_shared_cause(self) -> None:
        if found := await self.outside_hosts.missing(self.slurm):
            say(f"seen from {self.state.own_node}: {'; '.join(found)}")

    def _message(self, connection: Connection, message: Message) -> None:
        self.inbox.message(connection, message)

    async def _watch(self) -> None:
        hang = HangWatch(
            self.state, self.bus, lambda: self.stalls.standing() or self.verify.held_up
        )
        launch, guard = LaunchWatch(self.state, say, self._disturbed), Guard(say)
        while not self.state.ending:
            for watch in self._watches(hang, launch):
                guard.call(watch, time.monotonic())
            await asyncio.sleep(TICK)

    def _watches(self, hang: HangWatch, launch: LaunchWatch) -> Iterator[Callable[[float], None]]:
        """Return the watches to be called now."""
        yield self.node_watch.look
        yield self.ending.look
        yield self.stalls.look
        yield self._note_first_step
        yield self.verify.look
        # Ranks that are being stopped make no step, and that is no hang.
        if not self.state.failures and self.state.stopping_epoch < self.state.world.epoch:
            yield launch.look
            yield hang.look
            yield self.checkpoints.look
            yield self.certificates.look
            yield self.nodes.prerequest.for_doubtful
        yield self._update_roster

    def _disturbed(self) -> bool:
        """Return whether nodes are held up by what they share, or have just been."""
        return self.stalls.standing() or time.monotonic() - self.node_watch.disturbed < TICK * 5

    def _note_first_step(self, now: float) -> None:
        if self.account.first_step is None and self.state.progress.beats:
            self.account.first_step = now

    def _update_roster(self, now: float) -> None:
        if now >= self._next_roster:
            self._next_roster = now + self.config.roster_interval
            self.write_roster()

    def write_roster(self) -> None:
        name = self.env.get("SLURM_JOB_NAME", "")
        self.account.checking = self.verify.seconds
        record = roster(self.state, self.account, self.phase, name, "")
        record["checkpoint"] = self.checkpoints.record()
        if record["checkpoint"] is not None:
            record["checkpoint"]["checked"] = self.verify.text
        self.ledger.roster(self.state.step_id, record)

    def news(self, text: str) -> None:
        self.journal.news(text)
