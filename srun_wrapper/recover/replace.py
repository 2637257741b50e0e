"""Nodes that leave the job and nodes that come in their place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from robust_slurm.ledger import JobLedger
from robust_slurm.slurm import Slurm, SlurmError
from srun_wrapper.agent.batch_host_failover import claim
from srun_wrapper.command import steps
from srun_wrapper.command.input_rules import ONLY_HERE, limited
from srun_wrapper.decide.exclusions import Bad, Strength, remembered
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import Means
from srun_wrapper.detect.watch import NodeWatch
from srun_wrapper.protocol.messages import Finish, Stop
from srun_wrapper.recover.requeue import put_back
from srun_wrapper.recover.slurm_wait import SlurmWait
from srun_wrapper.recover.standby.asking import StandbyRequests
from srun_wrapper.recover.standby.nodes import MOST_UNFIT, StandbyNodes
from srun_wrapper.recover.standby.request import Barred, Requester
from srun_wrapper.supervisor.aside import aside
from srun_wrapper.supervisor.journal import Journal
from srun_wrapper.supervisor.model import AgentKey, Node, Role
from srun_wrapper.supervisor.report import say
from srun_wrapper.supervisor.state import JobState
from srun_wrapper.supervisor.topology import Topology

MAX_COMPANIONS = 64
IN_DOUBT = 3.0  # s for a silent spare to answer before a standby node is taken
CLAIM = 10.0  # s for the state directory to answer before a requeue
BUSY_TRIES = 30
BUSY_PAUSE = 10.0  # s between tries while Slurm says that the job cannot be changed now


class Replacement:
    """Carries out the part of a plan that concerns nodes."""

    def __init__(
        self,
        state: JobState,
        launch: steps.Launch,
        secrets: steps.Secrets,
        slurm: Slurm,
        ledger: JobLedger,
        journal: Journal,
        topology: Topology,
        node_watch: NodeWatch,
        ended: Callable[[], bool],
    ) -> None:
        """``ended``: True if the job's srun has ended."""
        self._state = state
        self._config = state.config
        self._launch = launch
        self._door = slurm
        self._ledger = ledger
        self._topology = topology
        self._node_watch = node_watch
        self._ended = ended
        self._bad: list[str] = []  # every node that ever left this job, less those acquitted
        self._reports: dict[str, tuple[str, int]] = {}  # node -> incident, job of the report
        self._remembered = remembered(ledger.dir)  # of earlier runs and steps
        self._seen: dict[str, Bad] = {}  # of this step
        self._slurm = SlurmWait(state.config.slurm_wait, self._over, say)
        requester = Requester(launch, secrets, slurm, topology.prefer)
        barred = Barred(self._bad, self._remembered)
        self._requests = StandbyRequests(state, requester, self._slurm, journal, barred)
        self._standby_nodes = StandbyNodes(
            state,
            self._requests,
            lambda: bool(state.failures) or state.signalled > 0 or ended(),
        )
        self._came: set[str] = set()  # took a place in the last recovery
        self._unfit: set[str] = set()  # came, and could not start a rank
        self._released: set[str] = set()  # those that Slurm has back
        self._suspected: set[AgentKey] = set()  # alive, but to leave the job
        self._silent: dict[AgentKey, Incident] = {}  # lost; reported if they do not come back
        self._shared: set[str] = set()  # lost by a cause that may be shared: not bad
        self.excluded: tuple[str, ...] = ()  # nodes that the job excludes from its requeue on
        self._state.on_back = self._came_back
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_feed = False

    def means(self, companions: int | None = None) -> Means:
        """Return the means that the ladder may count on now."""
        if companions is None:
            some = self._config.standby_partition and len(self._unfit) < MOST_UNFIT
            companions = MAX_COMPANIONS if some else 0
        batch = self._launch.env.get("SLURM_JOB_BATCH_HOST") or self._launch.env.get("ENVIRONMENT")
        requeue = self._config.requeue == "auto" and bool(batch)
        spares = len(self._state.spares())
        means = Means(spares, companions, requeue, self._config.max_restarts)
        had = [whole for n in self._state.world.places for whole in n.stdin.values()]
        left = limited(means, self._launch.feed, had)
        if left.companions < means.companions and not self._told_feed:
            self._told_feed = True
            say(f"{ONLY_HERE}: standby nodes are not used")
        return left

    def newcomers(self) -> set[str]:
        """Nodes that have just taken a place and have not started a rank."""
        ran = {rank.node.name for rank in self._state.world.by_rank.values() if rank.started}
        return self._came - ran

    def unfit(self, names: tuple[str, ...]) -> None:
        """Newcomers could not start a rank."""
        self._unfit.update(names)

    # -- leaving

    def leave(self, names: tuple[str, ...], incident: Incident) -> None:
        """Take nodes out of the job: no later epoch will use them."""
        for name in names:
            node = self._state.named(name)
            if node is None:
                continue
            if not node.gone:
                self._state.members.move(node, Role.EVICTED)
                self._suspected.add(node.key)
                if node.connection is not None:
                    node.connection.send(Stop(self._state.world.epoch, 0.0))
            excused = node.stalled and not node.own_mount  # its server may be away
            if excused and name not in self._bad:
                self._shared.add(name)
            elif name not in self._bad:
                self._bad.append(name)
                self._shared.discard(name)
                proven = name in incident.diagnosis.proven
                strength = Strength.PROVEN if proven else Strength.ONCE
                self._seen[name] = Bad(name, strength, incident.wall)
                if node.own_mount:
                    self._accuse(node, incident)
                elif name in incident.diagnosis.unreported:
                    self._shared.add(name)
                elif node.silent_as is not None:
                    self._silent[node.key] = incident
                elif not node.ours:
                    self._accuse(node, incident)

    def reinstate(self, names: tuple[str, ...]) -> None:
        """Nothing can replace them: suspects that are alive go on, lost nodes cannot."""
        for node in self._state.world.places:  # not those whose place another one has by now
            if node.name in names and node.key in self._suspected and node.connection:
                self._suspected.discard(node.key)
                self._state.members.move(node, Role.ACTIVE)

    def _came_back(self, node: Node) -> None:
        """A lost node answers again before it was replaced."""
        self._silent.pop(node.key, None)
        self._shared.discard(node.name)
        if node.name in self._bad:
            self._bad.remove(node.name)

    def report_silent(self) -> None:
        """Report the nodes that were lost and have not come back; now they are not waited for."""
        for key, incident in self._silent.items():
            self._accuse(self._state.nodes[key], incident)
        self._silent.clear()
        for node in self._state.nodes.values():
            node.silent_as = None

    def _accuse(self, node: Node, incident: Incident) -> None:
        diagnosis, mount = incident.diagnosis, node.own_mount
        alone = f"file system {mount} does not answer on {node.name} alone"
        record = {
            "job": node.job_id,
            "user": self._launch.env.get("SLURM_JOB_USER", ""),
            "time": incident.wall,
            "symptom": "mount_silent" if mount else diagnosis.symptom,
            "evidence": [alone] if mount else list(diagnosis.evidence),
            "proven": node.name in diagnosis.proven,
        }
        self._ledger.accuse(node.name, incident.id, record)
        self._reports[node.name] = (incident.id, node.job_id)

    def withdraw(self, names: tuple[str, ...], why: str) -> None:
        """Take back wrong reports: the gate drops them, and the nodes may be used again."""
        for name in names:
            if name in self._bad and (report := self._reports.pop(name, None)):
                self._bad.remove(name)
                self._ledger.withdraw(name, *report, why)
                say(f"the report against {name} is withdrawn: {why}")

    def release(self, incident: Incident) -> None:
        """Give the nodes that left back to Slurm, beside the running recovery."""
        self.report_silent()
        gone = [n for n in self._state.nodes.values() if n.gone]
        for node in gone:
            if node.connection is not None:
                exits = tuple((0, 0) for _ in range(node.slots))
                node.connection.send(Finish(exits))
            self._requests.end(node.companion)
        names = [
            n.name
            for n in gone
            if not n.companion and n.name not in (self._state.own_node, *self._released)
        ]
        self._in_background(self._release(names, incident))

    async def _release(self, names: list[str], incident: Incident) -> None:
        await self._insist(
            f"release {','.join(names)} from the job (unused in it until then)",
            lambda: self._give_back(names),
        )
        if self._config.drain == "direct":
            await self._insist("drain the bad node", lambda: self._drain(incident))

    def _over(self) -> bool:
        """True if the job is ending, so that nothing more is requested from Slurm."""
        state = self._state
        return state.signalled > 0 or state.ending or self._ended()

    async def _insist(self, what: str, order: Callable[[], None]) -> None:
        """Give Slurm an order, again while it cannot be carried out now; a refusal is said once."""
        for attempt in range(BUSY_TRIES):
            try:
                await self._slurm.call(what, order)
                return
            except SlurmError as err:
                if self._over():
                    return
                if attempt == 0:
                    say(f"cannot {what}: {err}")
                if err.kind != "conflict":
                    return
            await asyncio.sleep(BUSY_PAUSE)

    def _give_back(self, names: list[str]) -> None:
        slurm = self._door
        job = slurm.job(self._state.job_id)
        keep = [n for n in job.nodes if n not in names]
        if keep and len(keep) < len(job.nodes):
            slurm.shrink(self._state.job_id, keep)
            self._ledger.event("released", nodes=[n for n in job.nodes if n in names])
        self._released.update(names)

    def _drain(self, incident: Incident) -> None:
        assert incident.plan is not None
        # The node gate's grammar: its sweep takes the drain back when the node passes its checks.
        what = incident.diagnosis.symptom.replace("_", "-")
        for name in (n for n in incident.plan.replace if n in self._reports):
            reason = f"robust:node:{what}:-:none:job{self._state.job_id}"
            self._door.drain(name, reason)

    # -- coming

    async def fill(self, incident: Incident) -> bool:
        """Put a node in every vacant place. False: not enough came in time, or a new failure.

        A spare of the allocation comes before a standby node, also one that was in doubt and
        answers while standby nodes are awaited.
        """
        self._came.clear()
        world = self._state.world
        while wanted := self._fill_with_spares(incident):
            came = await self._standby_nodes.take(
                {place: (len(world.ranks[place]), world.places[place].name) for place in wanted},
                vacant=lambda place: world.places[place].gone,
                enough=lambda: any(self._fits(spare, wanted) for spare in self._state.spares()),
            )
            for place, node in came.items():
                self._take_place(place, node, incident)
            self._report_unfit(bool(came), incident)
            back = any(self._fits(spare, wanted) for spare in self._state.spares())
            if not back or self._state.failures or self._over():
                return not self._state.vacant()
        return True

    def _fill_with_spares(self, incident: Incident) -> list[int]:
        """Give the vacant places to spares; returns those for which there is none."""
        world = self._state.world
        vacant = [i for i, n in enumerate(world.places) if n.gone]
        spares = {n.name: n for n in self._state.spares() if n.slots >= 1}
        best = self._topology.prefer([world.places[p].name for p in vacant], list(spares))
        wanted: list[int] = []
        for place in vacant:
            names = [best.get(world.places[place].name, ""), *spares]
            fits = (n for n in names if n in spares and self._fits(spares[n], [place]))
            name = next(fits, "")
            if not name:
                wanted.append(place)
                continue
            self._take_place(place, spares.pop(name), incident)
        return wanted

    def _fits(self, spare: Node, places: Sequence[int]) -> bool:
        """True if one of the places is vacant and the spare has the slots for its ranks."""
        world = self._state.world
        return any(world.places[p].gone and spare.slots >= len(world.ranks[p]) for p in places)

    async def settle_spares(self, wanted: int) -> None:
        """Wait until it is known which spares answer, where the others are fewer than wanted.

        What makes a node of the job silent often makes its spares silent as well, for a moment.
        """
        until = time.monotonic() + IN_DOUBT
        suspected = self._node_watch.suspected

        def settled() -> bool:
            now, state = time.monotonic(), self._state
            spares = [n for n in state.live() if n.role is Role.SPARE and not n.companion]
            doubtful = [n for n in spares if not n.connection or suspected(n, now)]
            enough = len(spares) - len(doubtful) >= wanted
            return enough or not doubtful or now >= until or state.signalled > 0

        while not settled():
            await asyncio.sleep(0.02)

    def _report_unfit(self, came: bool, incident: Incident) -> None:
        """Report the standby nodes that did not run robust-task: a reason to look at them."""
        for name, (job, what) in self._standby_nodes.to_report(came).items():
            record = {
                "job": job,
                "user": self._launch.env.get("SLURM_JOB_USER", ""),
                "time": time.time(),
                "symptom": "standby_unfit",
                "evidence": [f"{name}: {what}"],
            }
            self._ledger.accuse(name, incident.id, record)

    async def reinforce(self, count: int, slots: int) -> list[Node]:
        """Nodes with so many slots, for places that the allocation has no nodes for."""
        came = await self._standby_nodes.take(dict.fromkeys(range(count), (slots, "")))
        return [came[place] for place in sorted(came)]

    async def arrange(self) -> None:
        """Move nodes among the places so that neighbours in the network stay together."""
        await self._topology.arrange()

    def _take_place(self, place: int, node: Node, incident: Incident) -> None:
        old = self._state.world.places[place]
        self._state.members.take_place(place, node)
        self._came.add(node.name)
        incident.swaps.append((old.name, node.name))

    def suspect(self, now: float) -> None:
        """Ask for companions while nodes are in doubt; called all the time while the job runs.

        Not when the step is being ended, nor when more fall silent than could be replaced: then
        it is rather this host that hears nobody.
        """
        doubted = self._node_watch.doubted
        doubtful = {
            place: node.name
            for place, node in enumerate(self._state.world.places)
            if node.role is Role.ACTIVE and doubted(node, now)
        }
        watch = self._node_watch
        over = self._state.signalled or self._ended() or watch.seems_shared(now)
        self._expect({} if over or len(doubtful) > MAX_COMPANIONS else doubtful)

    def expect(self) -> None:
        """Ask for companions for the vacant places now: that the ranks end takes time as well."""
        places = enumerate(self._state.world.places)
        self._expect({place: node.name for place, node in places if node.gone})

    def _expect(self, leaving: dict[int, str]) -> None:
        if self._config.standby_partition:
            wanted = sorted((len(self._state.world.ranks[p]), name) for p, name in leaving.items())
            self._requests.prerequest(wanted[len(self._state.spares()) :], list(leaving.values()))

    # -- the last rung

    def _evidence(self) -> list[Bad]:
        """Nodes that the job should not get again, with those of its earlier runs."""
        found = {one.node: one for one in self._remembered}
        for name in (name for name in self._bad if name not in self._shared):
            one, before = self._seen[name], found.get(name)
            found[name] = before.again(one.strength, one.time) if before else one
        return list(found.values())

    async def requeue(self, incident: Incident) -> str:
        """Put the job back in the queue; returns why not, or ''."""
        self.report_silent()
        restarts = int(self._launch.env.get("SLURM_RESTART_COUNT") or 0)
        if not await self._claim(restarts):
            return "the other nodes bring the job back: they have lost this one"
        try:
            job, self.excluded = await self._slurm.call(
                "put the job back in the queue",
                lambda: put_back(
                    self._door,
                    self._state.job_id,
                    self._evidence(),
                    self._config.standby_partition,
                    self._launch.options.size,
                    tuple(self._shared),
                    say,
                ),
                whole=True,
            )
        except SlurmError as err:
            return f"cannot requeue: {err}"
        if job != self._state.job_id:
            say(f"Slurm cannot requeue job {self._state.job_id} again: it continues as job {job}")
        return ""

    async def _claim(self, restarts: int) -> bool:
        """See ``orphan.claim``; a file system that does not answer cannot be asked."""
        directory = self._ledger.dir
        try:
            return await aside(lambda: claim(directory, restarts), CLAIM)
        except TimeoutError:
            say(f"{directory} does not answer in {CLAIM:g} s: requeueing without its records")
            return True

    async def close(self) -> None:
        """End all companions, and what runs in the background."""
        await self._requests.close()
        for task in list(self._tasks):
            if not task.done():
                await asyncio.wait([task], timeout=3.0)
            task.cancel()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
