"""robust-srun's main loop: launch, watch, recover, end.

Observations come in through JobState (messages) and the watches; ``diagnose`` and ``ladder``
decide; what is done about it is in this file and in ``replace``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import time

from robust_slurm.config import Config
from robust_slurm.ledger import JobLedger
from robust_slurm.slurm import Slurm
from srun_wrapper import ladder, steps
from srun_wrapper.diagnose import Failure, diagnose, is_cascade
from srun_wrapper.incident import Incident
from srun_wrapper.messages import Finish, Message, Peer, RankStart, Signal, Start, Stop
from srun_wrapper.replace import Replacement
from srun_wrapper.report import Account, roster, say
from srun_wrapper.roster import Node, Role, World, planned_world, real_world
from srun_wrapper.server import Connection, listen
from srun_wrapper.state import JobState
from srun_wrapper.watch import TICK, HangWatch, NodeWatch
from srun_wrapper.world import node_env, rank_env, world_env

ALL_HELLO = 60.0  # s between the first and the last shim's report
SETTLE = 0.3  # s to wait for the root of a failure that looks like a consequence
SETTLE_MAX = 4.0
SETTLE_NODES = 1.5  # s for other silent nodes to be judged when one is lost
STOP_MARGIN = 12.0  # s over the grace for a node to end its ranks
LAUNCH = 30.0  # s for a node to start its ranks
END = 20.0  # s for shims and srun to end
LAST_OUTPUT = 1.0  # s for srun to pass on the last output after all shims have ended
ROSTER_EVERY = 2.0
PEERS = 8
FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGQUIT)
TERMINATING = (signal.SIGINT, signal.SIGTERM)


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
        self.state.on_news = self._news
        self.ledger = JobLedger(config.job_dir(job_id))
        self.account = Account()
        self.budget = ladder.Budget()
        self.key = secrets.token_bytes(32)
        self._numbers = itertools.count(1)
        self._phase = "starting"
        self._srun: asyncio.subprocess.Process | None = None
        self._srun_task: asyncio.Task[int] | None = None
        self._replacement: Replacement | None = None
        self._interrupts: list[float] = []
        self._ending = False
        self._next_roster = 0.0
        self._node_watch = NodeWatch(self.state)

    # -- the whole life

    async def run(self) -> int:
        steps.raise_file_limit()
        server, port = await listen(self.key, self._message, self.state.closed)
        self._secrets = steps.Secrets(self.key, port)
        self._catch_signals()
        self._replacement = Replacement(self, self._secrets)
        watcher: asyncio.Task[None] | None = None
        try:
            await self._launch_step()
            missing = await self._wait_for_shims()
            if missing is not None:
                return missing
            self._first_world()
            watcher = asyncio.create_task(self._watch())
            self._begin_epoch("")
            return await self._life()
        finally:
            if watcher is not None:
                watcher.cancel()
            await self._replacement.close()
            await self._end_srun()
            server.close()
            self._write_roster()
            self.ledger.close()
            if self.ledger.dropped:
                say(f"{self.ledger.dropped} records were not written: {self.ledger.error}")

    async def _life(self) -> int:
        state = self.state
        while True:
            await state.until(self._something_to_do, None)
            if state.signalled or (state.world.all_exited() and not state.failures):
                return await self._finish()
            if self._srun_ended() and not state.failures:
                await asyncio.sleep(1.0)
                if not state.failures:
                    return await self._step_ended()
            code = await self._recover()
            if code is not None:
                return code

    def _something_to_do(self) -> bool:
        state = self.state
        if state.signalled:
            return state.world.all_exited() or not state.live() or self._srun_ended()
        return bool(state.failures) or state.world.all_exited() or self._srun_ended()

    # -- start

    async def _launch_step(self) -> None:
        argv = steps.main_argv(self.launch.plan.apply(self.launch.command), self.env)
        argv += steps.task_argv(
            self.config.task_python, self.launch.options, self.launch.command.command
        )
        env = {**self.env, **self._secrets.env()}
        self._srun = await steps.start(argv, env, own_session=not self.launch.options.inherit)
        self._srun_task = asyncio.create_task(self._srun.wait())
        self._srun_task.add_done_callback(lambda _t: self.state.changed.set())

    def _srun_ended(self) -> bool:
        return self._srun_task is not None and self._srun_task.done()

    async def _wait_for_shims(self) -> int | None:
        """Wait until every node of the step has reported; an exit code if it never will."""
        state = self.state
        await state.until(lambda: bool(state.nodes) or self._srun_ended(), None)

        def complete() -> bool:
            wanted = next(iter(state.nodes.values())).hello.step_nodes if state.nodes else 1
            return len(state.nodes) >= wanted or self._srun_ended()

        await state.until(complete, ALL_HELLO)
        if self._srun_ended() and self._srun is not None:
            code = self._srun.returncode or 1
            say(f"srun could not start the step (exit code {code}); its message is above")
            return code if code > 0 else 128 - code
        wanted = next(iter(state.nodes.values())).hello.step_nodes
        needed = self.launch.plan.active_nodes or wanted
        if len(state.nodes) < needed:
            say(
                f"{wanted - len(state.nodes)} of {wanted} nodes did not start robust-task within "
                f"{ALL_HELLO:g} s, {needed} are needed; look at slurmd's log on the nodes missing "
                f"from: {', '.join(n.name for n in state.nodes.values())}"
            )
            return ladder.NOTHING_LEFT
        return None

    def _first_world(self) -> None:
        state = self.state
        nodes = list(state.nodes.values())
        if self.launch.plan.ranks_per_active_node is None:
            places, ranks = real_world(nodes)
        else:
            places, ranks = planned_world(nodes, self.launch.plan.ranks_per_active_node)
        state.world = World(0, places, ranks)
        for node in places:
            node.role = Role.ACTIVE
        if self.config.verbose or state.spares():
            spare = ", ".join(n.name for n in state.spares()) or "none"
            say(f"{len(places)} nodes, {state.world.size} ranks, spares: {spare}")

    # -- an epoch

    def _begin_epoch(self, reason: str) -> None:
        """Send every place its part of the next epoch."""
        state = self.state
        epoch = state.new_epoch()
        world = state.world
        master = next(n for n, ranks in zip(world.places, world.ranks, strict=True) if 0 in ranks)
        shared = world_env(
            names=[n.name for n in world.places],
            ranks=[tuple(r) for r in world.ranks],
            epoch=epoch,
            master_addr=master.address,
            master_port=master.free_port,
            restart_reason=reason,
            job_id=state.job_id,
            step_id=state.step_id,
        )
        peers = tuple(
            Peer(i, n.address, n.hello.probe_port) for i, n in enumerate(world.places[:PEERS])
        )
        for index, (node, ranks) in enumerate(zip(world.places, world.ranks, strict=True)):
            starts = tuple(
                RankStart(local, rank, rank_env(rank=rank, local=local))
                for local, rank in enumerate(ranks)
            )
            own = node_env(index=index, name=node.name, ranks=tuple(ranks))
            self._send(
                node,
                Start(
                    epoch,
                    {**shared, **own},
                    starts,
                    self.config.stop_grace,
                    index,
                    epoch == 1,
                    len(world.places),
                    master.address,
                    master.free_port,
                    peers,
                ),
            )
        self.ledger.event("epoch", epoch=epoch, nodes=[n.name for n in world.places], why=reason)
        if self._phase != "recovering":
            self._phase = "running"

    def _send(self, node: Node, message: Message) -> None:
        if isinstance(message, Start | Stop | Finish):
            node.order = message
        if node.connection is not None:
            node.connection.send(message)

    def broadcast(self, message: Message) -> None:
        for node in self.state.live():
            self._send(node, message)

    # -- recovery

    async def _recover(self) -> int | None:
        """Handle what has failed; an exit code when the job must end."""
        state = self.state
        self._phase = "recovering"
        await self._settle()
        if state.signalled:
            return None
        failures = list(state.failures)
        state.failures.clear()
        state.stopping_epoch = state.world.epoch
        if state.progress.since_failure():
            self.budget.refill()
        state.progress.failed()
        diagnosis = diagnose(failures)
        self.budget.spend(diagnosis)
        root = diagnosis.root
        incident = Incident(
            f"{self.state.step_id}-{next(self._numbers)}",
            state.world.epoch,
            diagnosis,
            root.last_good,
            root.at,
        )
        self.ledger.event("failure", symptom=diagnosis.symptom, evidence=diagnosis.evidence)
        assert self._replacement is not None
        means = self._replacement.means()
        while True:
            incident.plan = ladder.plan(diagnosis, state.vacant(), self.budget, means)
            incident.mark("decide")
            plan = incident.plan
            self._news(f"{'; '.join(diagnosis.evidence)} -> {plan.action} ({plan.why})")
            if plan.action == "stop":
                return await self._give_up(incident, root)
            if plan.action == "requeue":
                return await self._requeue(incident)
            self._replacement.leave(plan.replace, incident)
            filled = await self._stop_world(incident) and await self._replacement.fill(incident)
            if filled and not state.failures:
                incident.mark("replace")
                break
            if state.failures:
                self.budget.failures -= 1  # nothing was tried: the next one will be
                self._close(incident, "superseded by another failure")
                return None
            # No replacement came: the next rung, with what is left.
            self._replacement.take_back(plan.replace)
            means = self._replacement.means(companions=0)
        reason = f"{diagnosis.symptom}: {diagnosis.evidence[0] if diagnosis.evidence else ''}"
        self._begin_epoch(reason)
        self._replacement.release(incident)
        if not await self._until_stepping(incident):
            self._close(incident, "superseded by another failure")
            return None
        self._close(incident, "recovered")
        say(incident.line())
        self._phase = "running"
        return None

    async def _settle(self) -> None:
        """Wait for what belongs together.

        While all failures seen look like consequences, their root is still to come; and when a
        node is lost, others that are silent now (the same switch, the same power) go with it.
        """
        state = self.state
        began = time.monotonic()
        while any(f.symptom == "node_lost" for f in state.failures) and (
            self._node_watch.doubtful() and time.monotonic() - began < SETTLE_NODES
        ):
            await asyncio.sleep(0.02)
        while all(is_cascade(f) for f in state.failures) and not state.signalled:
            waited = time.monotonic() - began
            open_question = (
                waited < SETTLE or self._node_watch.doubtful() or self._being_signalled()
            )
            if waited >= SETTLE_MAX or not open_question:
                return
            await asyncio.sleep(0.02)
        while self._being_signalled() and time.monotonic() - began < SETTLE:
            await asyncio.sleep(0.02)

    def _being_signalled(self) -> bool:
        """Some shims were signalled by Slurm: is the whole step being ended?"""
        return not self.state.signalled and any(n.signalled for n in self.state.live())

    async def _stop_world(self, incident: Incident) -> bool:
        """End all ranks of this epoch on the nodes that stay; False if another failure came."""
        state = self.state
        epoch = state.world.epoch
        staying = [n for n in state.world.places if n.role is Role.ACTIVE]
        for node in staying:
            self._send(node, Stop(epoch, self.config.stop_grace))
        done = await state.until(
            lambda: bool(state.failures)
            or all(n.stopped >= epoch or n.role is Role.LOST for n in staying),
            self.config.stop_grace + STOP_MARGIN,
        )
        for node in staying:
            if node.role is Role.ACTIVE and node.stopped >= epoch and node.stuck:
                pids = ", ".join(map(str, node.stuck))
                state.lose(node, f"processes survive SIGKILL (pids {pids})", "stuck")
            elif not done and node.role is Role.ACTIVE and node.stopped < epoch:
                state.lose(node, "its ranks could not be stopped", "stuck")
        incident.mark("stop")
        if state.progress.numbered:
            incident.step_before = state.progress.best  # the last reports are in now
        return not state.failures

    async def _until_stepping(self, incident: Incident) -> bool:
        """Wait for the new epoch's first step everywhere; False if another failure came."""
        state = self.state
        world = state.world
        stepped_before = bool(world.steppers)

        def over() -> bool:
            return bool(state.failures) or state.signalled > 0 or self._srun_ended()

        launched = await state.until(lambda: over() or world.all_started(), LAUNCH)
        incident.mark("launch")
        if not launched:
            for node in {
                id(r.node): r.node for r in world.by_rank.values() if not r.started
            }.values():
                state.lose(node, f"did not start its ranks in {LAUNCH:g} s")
        if state.failures:
            return False
        if stepped_before:
            await state.until(lambda: over() or world.all_stepped(), None)
            if state.failures:
                return False
            incident.resume_step = state.progress.resume
        incident.mark("first_step")
        return True

    def _close(self, incident: Incident, outcome: str) -> None:
        incident.outcome = outcome
        self.account.incident(incident, self.state.pace.step_time())
        self.ledger.incident(incident.record(self.state.job_id, self.state.step_id))
        self._write_roster()

    # -- the end

    async def _give_up(self, incident: Incident, root: Failure) -> int:
        assert incident.plan is not None
        code = incident.plan.code
        own = root.code if root.code is not None else 128 + (root.signal or 0)
        code = code or own or ladder.GAVE_UP
        await self._stop_world(incident)
        self._close(incident, f"stopped: {incident.plan.why}")
        say(f"stopped: {incident.plan.why}: {'; '.join(incident.diagnosis.evidence)}")
        if root.tail.strip():
            say(f"last output of rank {root.rank} on {root.node}:")
            with contextlib.suppress(OSError):
                os.write(2, root.tail.rstrip().encode(errors="replace") + b"\n")
        self._phase = "failed"
        await self._finish()
        return code

    async def _requeue(self, incident: Incident) -> int:
        assert self._replacement is not None and incident.plan is not None
        self._replacement.leave(incident.plan.replace, incident)
        await self._stop_world(incident)
        error = await self._replacement.requeue(incident)
        if error:
            say(error)
            self._close(incident, f"requeue failed: {error}")
            self._phase = "failed"
            await self._finish()
            return ladder.NOTHING_LEFT
        self._phase = "requeued"
        self._close(incident, "requeued")
        bad = ",".join(incident.plan.replace)
        say(f"no node can replace {bad}: the job goes back to the queue without {bad}")
        await self._finish()
        return ladder.REQUEUED

    async def _step_ended(self) -> int:
        """srun ended although ranks should be running: someone cancelled the step."""
        code = self._srun.returncode if self._srun else 1
        say(f"the step was ended by Slurm (srun exit code {code})")
        self._phase = "terminating"
        return (code if code >= 0 else 128 - code) if code is not None else 1

    async def _finish(self) -> int:
        """Let every shim end like its rank; returns the step's exit code as srun computes it."""
        state = self.state
        self._ending = True
        for node in state.live():
            exits = []
            for local in range(node.slots):
                rank = state.world.rank_at(node, local) if node.role is Role.ACTIVE else None
                exit_ = (0, 0) if rank is None else rank.exit or (0, signal.SIGTERM)
                exits.append((int(exit_[0]), int(exit_[1])))
            self._send(node, Finish(tuple(exits)))
        codes = [
            128 + r.exit[1] if r.exit[1] else r.exit[0]
            for r in state.world.by_rank.values()
            if r.exit is not None
        ]
        if self._phase in ("running", "starting"):
            self._phase = "terminating" if state.signalled else "done"
        swapped = any(n.role is Role.LOST or n.companion for n in state.nodes.values())
        await self._end_srun(swapped)
        if not swapped and self._srun is not None and self._srun.returncode is not None:
            code = self._srun.returncode
            return code if code >= 0 else 128 - code
        if state.signalled and not any(codes):
            return 128 + state.signalled
        return max(codes, default=0)

    async def _end_srun(self, swapped: bool = False) -> None:
        """Wait for srun; one that does not end is terminated.

        After a swap srun waits for ever for the tasks of the node that left, although Slurm has
        completed the step; there is nothing more to hear from it once the shims are gone.
        """
        if self._srun is None or self._srun_task is None:
            return
        state = self.state
        patience: tuple[tuple[int, float], ...] = (
            (0, END),
            (signal.SIGTERM, 10.0),
            (signal.SIGKILL, 5.0),
        )
        if swapped:
            await state.until(lambda: not any(n.connection for n in state.live()), END)
            patience = ((0, LAST_OUTPUT), (signal.SIGKILL, 5.0))
        for signum, seconds in patience:
            if self._srun_task.done():
                return
            if signum:
                with contextlib.suppress(ProcessLookupError):
                    self._srun.send_signal(signum)
            await asyncio.wait([self._srun_task], timeout=seconds)

    # -- signals

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            loop.add_signal_handler(signum, self._forward, signum)
        for signum in TERMINATING:
            loop.add_signal_handler(signum, self._terminate, signum)

    def _forward(self, signum: int) -> None:
        self.state.passed_on.add(signum)
        self.broadcast(Signal(signum))

    def _terminate(self, signum: int) -> None:
        """As srun does: pass it on; a second Ctrl-C within a second ends the step."""
        now = time.monotonic()
        self._interrupts = [t for t in self._interrupts if now - t < 1.0] + [now]
        self.state.signalled = signum
        if not self.state.nodes and self._srun is not None:
            self._srun.send_signal(signum)
        self.broadcast(Signal(signum))
        if signum == signal.SIGINT and len(self._interrupts) > 1:
            self.broadcast(Signal(signal.SIGKILL))
        self.state.changed.set()

    # -- beside the loop

    def _message(self, connection: Connection, message: Message) -> None:
        self.state.message(connection, message)

    async def _watch(self) -> None:
        hang = HangWatch(self.state)
        told: set[str] = set()
        while not self._ending:
            try:
                self._look(time.monotonic(), hang)
            except Exception as err:  # noqa: BLE001 - a slip in a watch must not end the job
                text = f"{type(err).__name__}: {err}"
                if text not in told:
                    told.add(text)
                    say(f"internal error while watching, going on: {text}")
            await asyncio.sleep(TICK)

    def _look(self, now: float, hang: HangWatch) -> None:
        self._node_watch.look(now)
        if self.account.first_step is None and self.state.progress.beats:
            self.account.first_step = now
        if not self.state.failures:
            hang.look(now)
        if now >= self._next_roster:
            self._next_roster = now + ROSTER_EVERY
            self._write_roster()

    def _write_roster(self) -> None:
        name = self.env.get("SLURM_JOB_NAME", "")
        record = roster(self.state, self.account, self._phase, name, "")
        self.ledger.roster(self.state.step_id, record)

    def _news(self, text: str) -> None:
        self.ledger.event("news", text=text)
        if self.config.verbose:
            say(text)
