"""The supervisor's record of the job's checkpoints, and the choice of targets for replicas."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from robust_slurm.checkpoint.format.sizes import exceeds, megabytes
from robust_slurm.checkpoint.planning import placement
from robust_slurm.checkpoint.planning.alike import Comparison
from robust_slurm.checkpoint.planning.interval import Interval
from robust_slurm.checkpoint.planning.survival import survives as survival
from robust_slurm.checkpoint.planning.topology import leaves
from robust_slurm.checkpoint.store.events import Target
from srun_wrapper.checkpoints.durable_steps import DurableSteps
from srun_wrapper.checkpoints.watermark import Watermark
from srun_wrapper.protocol.checkpoint_messages import (
    Alarm,
    Committed,
    Complete,
    Enrolled,
    MakeRoom,
    PersistAt,
    Persisted,
    Place,
    Resumed,
    Saved,
    SaveEvery,
    StoreReady,
    Unshare,
)
from srun_wrapper.protocol.messages import Message
from srun_wrapper.supervisor.alarms import Alarms, kind
from srun_wrapper.supervisor.aside import aside
from srun_wrapper.supervisor.bus import Address
from srun_wrapper.supervisor.report import say
from srun_wrapper.supervisor.roster import AgentKey, Node

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

AHEAD = 2.0  # s between ordering a durable checkpoint and its step; at least 4 intervals
TELL = 0.5  # s between two words to all stores of what all ranks have
PARTIAL = 30.0  # s for the other ranks to enrol when one has saved a step
TOPOLOGY = 10.0  # s for Slurm to say how nodes are connected


@dataclass(frozen=True, slots=True)
class StoreAt:
    """One slot's store in the running job."""

    node: Node
    local: int

    @property
    def name(self) -> str:
        return f"{self.node.key[0]}.{self.node.key[1]}.{self.node.key[2]}/{self.local}"

    @property
    def address(self) -> Address:
        return self.node.key, self.local


@dataclass(slots=True)
class Enrolment:
    """Enrolment of a rank's Checkpointer, with the epoch in which it was received."""

    epoch: int
    place: int  # of its node in the world
    at: StoreAt
    said: Enrolled


@dataclass(slots=True)
class Checkpoints:
    """Fed by ``heard``; asks the supervisor to send orders."""

    boss: Supervisor
    on_enrolled: Callable[[StoreAt, Enrolled], None] = lambda _at, _said: None
    ranks: dict[int, Enrolment] = field(default_factory=dict)
    saved: dict[int, Saved] = field(default_factory=dict)
    durable_step: int | None = None
    survives: str = ""
    _here: set[int] = field(default_factory=set)  # ranks that enrolled in the running epoch
    resumed_in: int = 0  # the newest epoch of which a rank said what it resumed from
    _placed: int = 0  # epoch whose ranks have been placed
    _leaf: dict[str, str] | None = None
    _told: set[str] = field(default_factory=set)
    _roomy: set[AgentKey] = field(default_factory=set)  # waiting nodes that have been told
    _placing: asyncio.Task[None] | None = None
    _durable: DurableSteps = field(init=False)
    interval: Interval = field(init=False)
    _alarms: Alarms = field(init=False)
    _everywhere: Watermark = field(default_factory=Watermark)
    _told_at: float = -math.inf  # when it was told
    _newest: int = 0  # step that any rank has saved in this epoch
    _saving_since: float = 0.0  # in this epoch
    _alike: Comparison = field(default_factory=Comparison)

    def __post_init__(self) -> None:
        self._alarms = Alarms(lambda text: say(text))  # as it is then: tests put another in place
        self.interval = Interval(self.boss.config.checkpoint_overhead / 100)
        self._durable = DurableSteps(60 * self.boss.config.checkpoint_minutes or math.inf)

    # -- what was said

    def heard(self, node: Node, message: Message) -> None:
        """Everything that stores say comes through here."""
        try:
            self._heard(node, message)
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            self._say_once(f"checkpoints: internal error: {type(err).__name__}: {err}")

    def _heard(self, node: Node, message: Message) -> None:
        if isinstance(message, StoreReady):
            node.stores[message.local] = message.port
            node.store_host = message.host
        elif isinstance(message, Enrolled):
            if message.epoch == self.boss.state.world.epoch:
                place = self.boss.state.world.place_of(node)
                if place is None:
                    return
                at = StoreAt(node, message.local)
                self.ranks[message.rank] = Enrolment(message.epoch, place, at, message)
                self.on_enrolled(at, message)
                self._here.add(message.rank)
                self._everywhere.began(message.rank)
                if message.rank == 0:
                    self._durable.every = message.every
                if len(self._here) >= message.world and self._placed != message.epoch:
                    self._placed = message.epoch
                    self._placing = asyncio.create_task(self._place())
        elif isinstance(message, Saved):
            if message.epoch == self.boss.state.world.epoch:
                self.saved[message.rank] = message
                self._newest = max(self._newest, message.step)
                self._everywhere.add(message.rank, message.safe, message.have)
                self.interval.hear(message.rank, message.step, message.cost)
                progress = self.boss.state.progress
                progress.saved = max(progress.saved or 0, message.step)
                self._look_at_size(message)
                self._compare(message)
        elif isinstance(message, Persisted):
            self._durable.written(message.step, self.world)
            if not message.ok:
                text = f"step {message.step} not on disk: {message.why}"
                self._alarm(node, message.rank, text, kind(message.why))
        elif isinstance(message, Committed):
            self._durable.over(message.step)
            self._committed(message)
        elif isinstance(message, Alarm):
            self._alarm(node, message.rank, message.text)
        elif isinstance(message, Resumed) and message.epoch == self.boss.state.world.epoch:
            self._durable.resumed(message.step)
            if message.epoch != self.resumed_in:
                self.resumed_in = message.epoch
                self.boss.ledger.event("resumed", rank=message.rank, step=message.step)

    def _committed(self, message: Committed) -> None:
        self.boss.ledger.event("durable", step=message.step, ok=message.ok, why=message.why)
        if message.ok:
            self.durable_step = max(message.step, self.durable_step or 0)
            self.boss.certificates.durable(message.step)
            self.boss.news(f"checkpoint of step {message.step} is on disk")
        elif message.step > (self.durable_step or 0):
            self._say_missing()
            text = f"no durable checkpoint of step {message.step}: {message.why}"
            self._say_once(text, kind(message.why))

    def _alarm(self, node: Node, rank: int, text: str, key: str = "") -> None:
        """``key``: what makes it the same trouble as before, if not the kind of its text."""
        line = f"checkpoints, rank {rank} on {node.name}: {text}"
        if self._alarms.add(time.monotonic(), rank, text, line, key):
            self.boss.ledger.event("checkpoint_alarm", node=node.name, rank=rank, text=text)

    def _say_once(self, text: str, key: str = "") -> None:
        if (key or text) not in self._told:
            self._told.add(key or text)
            say(text)

    @property
    def world(self) -> int:
        """Ranks that the training has; 0: nobody has said so yet."""
        return next((e.said.world for e in self.ranks.values()), 0)

    @property
    def directory(self) -> str:
        """The durable tier's, "" for none."""
        said = next((e.said.directory for e in self.ranks.values()), "")
        return said or self.boss.config.checkpoint_dir

    # -- where replicas go

    async def _place(self) -> None:
        """Choose for every rank the store that gets its replica, and tell the stores."""
        try:
            await self._place_all()
        except Exception as err:  # noqa: BLE001 - nobody reads the exception of a task
            self._say_once(f"checkpoints: no replicas: internal error: {type(err).__name__}: {err}")

    async def _place_all(self) -> None:
        if self._leaf is None:
            self._leaf = await self._switches()
        epoch = self.boss.state.world.epoch
        ranks = {r: e for r, e in self.ranks.items() if e.epoch == epoch}
        world = max(ranks, default=-1) + 1
        if sorted(ranks) != list(range(world)):
            return  # another epoch has begun
        names = [ranks[r].at.node.name for r in range(world)]
        mesh = ranks[0].said.mesh
        if any(e.said.mesh != mesh for e in ranks.values()):
            say("checkpoints: the ranks name different meshes: placed without regard to groups")
            mesh = {}
        placed = placement.place(names, mesh, self._leaf)
        orders: dict[int, tuple[Node, dict[int, Target | None]]] = {}
        for owner, holder in enumerate(placed.holders):
            node = ranks[owner].at.node
            to = ranks[holder].at if holder is not None else None
            port = to.node.stores.get(to.local, 0) if to is not None else 0
            target = None
            if to is not None and holder is not None and port:
                host = to.node.store_host or to.node.address
                target = Target(holder, host, port, to.node.name)
            orders.setdefault(id(node), (node, {}))[1][owner] = target
        for node, targets in orders.values():
            self.boss.bus.send(node, Place(targets))
        survives = survival(placed, names, mesh, self._leaf).text
        if survives != self.survives:
            self.survives = survives
            size = max(e.said.size for e in ranks.values())
            where = self.directory or "nowhere (set checkpoint_dir)"
            text = (
                f"checkpoints: every step in memory, about {megabytes(size)} a rank; "
                f"replicas survive the loss of {survives}; on disk: {where}"
            )
            say(text)
            self.boss.ledger.event("checkpoints", text=text)

    async def _switches(self) -> dict[str, str]:
        try:
            text = await aside(self.boss.slurm.topology, TOPOLOGY)
        except Exception as err:  # noqa: BLE001 - without a topology nodes are all alike
            self.boss.news(f"no topology: {err}")
            return {}
        return leaves(text)

    def mesh(self) -> dict[str, int]:
        """As the ranks have named it; {} if they have not."""
        return next((dict(e.said.mesh) for e in self.ranks.values()), {})

    # -- from time to time

    def look(self, now: float) -> None:
        """While the ranks run."""
        self._alarms.look(now)
        if self.saved:
            self._make_room()
            self._persist(now)
            self._pace(now)
            self._complete(now)
            self._look_for_missing(now)

    def _make_room(self) -> None:
        """Nodes that wait without ranks make room for what they would have to fetch."""
        waiting = [n for n in self.boss.state.spares() if n.stores and n.key not in self._roomy]
        all_here = self._here and self._placed == self.boss.state.world.epoch
        if not waiting or not all_here or len(self.saved) < len(self._here):
            return  # it is not known yet how large snapshots are, or who needs which
        needs: dict[str, set[int]] = {}
        for rank in self._here:
            each = self.ranks[rank]
            needs.setdefault(each.at.name, set()).update(each.said.needs)
        size = max(saved.size for saved in self.saved.values())
        for node in waiting:
            self._roomy.add(node.key)
            self.boss.bus.send(node, MakeRoom(size, max(map(len, needs.values()))))

    def _persist(self, now: float) -> None:
        """Order the next durable checkpoint."""
        timed = self.boss.state.pace.step_time() is not None
        # The newest step that was saved may be as many steps back as two are apart.
        newest = self._newest + self.interval.every - 1
        step = self._durable.next(now, newest, self.ahead(), timed=timed)
        if step is not None:
            self.boss.bus.broadcast(PersistAt(step))

    def unwritten(self, before: int) -> bool:
        """True if a step older than ``before`` is on its way to disk, and lost by a restart."""
        return bool(self.directory) and self._durable.is_open(before)

    def _complete(self, now: float) -> None:
        """Tell all stores the newest step that all ranks have: older ones free their memory."""
        if now - self._told_at >= TELL and self._everywhere.look(self.world):
            self._told_at = now
            self.boss.bus.broadcast(Complete(self._everywhere.step, self._everywhere.passed))

    def ahead(self) -> int:
        """Steps until all ranks have heard of an order."""
        timed = self.boss.state.pace.step_time()
        seconds = max(AHEAD, 4 * self.boss.state.interval)
        return math.ceil(seconds / (timed or 1.0)) + 1

    def _pace(self, now: float) -> None:
        """Have fewer or more steps saved, if saving costs more or less than it may."""
        newest = self._newest + self.interval.every - 1
        if self.interval.look(now, newest + self.ahead()):
            self.boss.bus.broadcast(SaveEvery(self.interval.every, self.interval.first))
            text = f"checkpoints: in memory {self.interval.text()}"
            say(text)
            self.boss.ledger.event("checkpoint_every", every=self.interval.every, text=text)

    def _look_for_missing(self, now: float) -> None:
        """A script in which only some ranks make a Checkpointer looks as if it saved."""
        self._saving_since = self._saving_since or now
        if now - self._saving_since > PARTIAL:
            self._say_missing()

    def _say_missing(self) -> None:
        if not self._here or len(self._here) >= self.world:
            return
        missing = sorted(set(range(self.world)) - self._here)
        who = ", ".join(map(str, missing[:8])) + (", …" if missing[8:] else "")
        has = f"ranks {who} have" if missing[1:] else f"rank {who} has"
        self._say_once(
            f"checkpoints: {has} no Checkpointer: nothing can be resumed. Every rank makes one and "
            "calls resume()",
            "no Checkpointer",
        )

    def _look_at_size(self, saved: Saved) -> None:
        """Before the first snapshot only models and optimizers are known."""
        said = self.ranks[saved.rank].said.size
        if exceeds(saved.size, said):
            self._say_once(
                f"checkpoints: a snapshot takes {megabytes(saved.size)} a rank, not "
                f"{megabytes(said)}: loader and extra hold the rest",
                "size",
            )

    def _compare(self, saved: Saved) -> None:
        """Ranks that share a state must go on alike: else none could be put together again."""
        needs = self.ranks[saved.rank].said.needs
        lowest = min(needs)  # of the group, and one of those that each needs
        if len(needs) < 2:
            return
        why = self._alike.add(lowest, saved.rank, saved.same)
        self.boss.certificates.compared(saved.rank, saved.same, alike=not why)
        if not why:
            return
        self._alike.forget(lowest)
        said = {rank: each.said.needs for rank, each in self.ranks.items()}
        group = tuple(sorted(r for r, of in said.items() if len(of) > 1 and min(of) == lowest))
        self.boss.bus.broadcast(Unshare(group))
        self.boss.ledger.event("unshared", ranks=group, why=why)
        self._say_once(
            f"checkpoints: ranks that shared their state no longer hold the same ({why}): each of "
            f"the {len(group)} saves all of its own from now on",
            f"unshared {lowest}",
        )

    # -- for robust-status

    def record(self) -> dict[str, Any] | None:
        """Return the roster's entry on checkpoints; None when no rank uses any."""
        if not self.ranks:
            return None
        newest = [s.step for s in self.saved.values()]
        copies = [s.replicated for s in self.saved.values() if s.replicated is not None]
        return {
            "step": min(newest, default=None),
            "replicated": min(copies, default=None) if len(copies) == len(newest) else None,
            "durable": self.durable_step,
            "certified": self.boss.certificates.newest,
            "every": self.interval.every,
            "why_every": self.interval.text() if self.interval.every > 1 else "",
            "survives": self.survives,
            "directory": self.directory,
            "bytes": max((s.size for s in self.saved.values()), default=0),
            "blocked_s": max((s.blocked_s for s in self.saved.values()), default=0.0),
        }

    def new_epoch(self, restored: bool) -> None:
        """All ranks start anew; ``restored``: from memory, which another fault may take."""
        self.saved.clear()
        self._alike = Comparison()
        self._here.clear()
        self.interval.begin()
        self._everywhere = Watermark()
        self._newest = 0
        self._saving_since = 0.0
        self._durable.begin(at_once=restored)
