"""Before an epoch: find what the ranks can be restored from and bring it where it is needed.

And before an end: write what only memory has to the durable tier.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING

from robust_slurm.checkpoint.durable import tier
from robust_slurm.checkpoint.planning import plan as planner
from robust_slurm.checkpoint.planning.flush import flush as plan_flush
from robust_slurm.checkpoint.planning.sound import only_sound
from robust_slurm.checkpoint.store.events import Restore, Wanted
from srun_wrapper.checkpoints.late_arrivals import Elsewhere
from srun_wrapper.checkpoints.registry import StoreAt
from srun_wrapper.command.rank_env import fold_hosts
from srun_wrapper.protocol.checkpoint_messages import Fetch, Flush, Moved, Stock, TakeStock
from srun_wrapper.protocol.messages import Message
from srun_wrapper.supervisor.aside import aside
from srun_wrapper.supervisor.bus import Address
from srun_wrapper.supervisor.report import say
from srun_wrapper.supervisor.roster import Node

if TYPE_CHECKING:
    from srun_wrapper.supervisor.supervisor import Supervisor

INTERNAL = "checkpoints: internal error"
ANNOUNCE = 10.0  # s for the stores of a node that has come to say where they are
STOCK = 20.0  # s for a store to answer, and for every
STOCK_RATE = 1e9  # bytes that it has to check, one more
LEAVING = 1.0  # s longer for nodes that are leaving the job
TRIES = 8  # plans in one recovery: what is bad shows only when it is read or fetched
PLAN = 120.0
TOLD = 8  # bad copies that are said
NOTED = 64  # copies passed over that are noted one by one
FETCH = 600.0
END = 600.0  # s for the last durable checkpoint of a job that ends by itself
SIGNALLED = 20.0  # s for one that is ended, and at most
OF_KILL_WAIT = 0.7  # of the time that Slurm gives it
ASK = 2.0  # s for Slurm to say how long that is


class Restoring:
    """Makes the restore plan of the next epoch, and flushes."""

    def __init__(self, boss: Supervisor) -> None:
        self._boss = boss
        self._plan: planner.Resume | None = None
        self._shards: dict[str, dict[int, str]] = {}  # of each node
        self.doubt = ""
        """Reason why the newest states may be spoiled, until an epoch resumes; see ``Trust``."""
        self._stand = -1  # see Restore
        self.elsewhere = Elsewhere(boss, self._fetch, self._interrupted)

    # -- the next epoch's

    def of(self, node: Node) -> Restore | None:
        """Return the restore order for a node's ranks; None if nothing is restored."""
        plan = self._plan
        if plan is None or not plan.tier:
            return None
        return Restore(plan.step, plan.tier, self._shards.get(node.name, {}), self._stand)

    @property
    def step(self) -> int | None:
        return self._plan.step if self._plan is not None and self._plan.tier else None

    @property
    def from_memory(self) -> bool:
        return self._plan is not None and self._plan.tier == "memory"

    @property
    def lines(self) -> tuple[str, ...]:
        return self._plan.lines if self._plan is not None else ()

    async def prepare(self, only: tuple[int, int] | None = None, stand: int = -1) -> bool:
        """Decide and fetch. False if another failure or the end came in between.

        ``only``: this (step, epoch) in memory and nothing else; ``stand``: see Restore.
        """
        self._plan, self._stand = None, stand
        self.elsewhere.begin(None, {}, {})
        try:
            return await self._prepare(only)
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            say(f"{INTERNAL}; the ranks look on disk by themselves: {type(err).__name__}: {err}")
            return not self._interrupted()

    async def stock(self) -> list[planner.Place]:
        """All that the stores have, by their headers."""
        return await self._stock(self._interrupted)

    async def _prepare(self, only: tuple[int, int] | None = None) -> bool:
        boss = self._boss
        if not boss.checkpoints.ranks and not boss.config.checkpoint_local_dir:
            return not self._interrupted()
        await boss.state.until(lambda: self._interrupted() or self._all_announced(), ANNOUNCE)
        places, on_disk = await asyncio.gather(self._stock(self._interrupted), self._durable())
        if only is not None:
            places, on_disk = _only(places, [only]), []
        steps = [(c.step, c.world) for c in on_disk]
        seats = self._seats()
        if len(seats) < self._world():
            # Of torchrun's ranks some have never come so far as to save anything.
            return not self._interrupted()
        stores = self._stores()
        without = sorted({seat.node for seat in seats.values() if seat.store not in stores})
        if without and places:
            say(f"checkpoints: no memory for them on {','.join(without)}: all resume from disk")
            places = []  # its ranks could not be given what the others have
        failed: set[tuple[str, int, int]] = set()
        read: set[int] = set()
        for _ in range(TRIES):
            if self._interrupted():
                return False
            before = boss.state.nans.bound
            trust = boss.certificates.trust(places, on_disk, self.doubt)
            world = self._world()
            plan = await aside(
                partial(planner.plan, places, seats, world, steps, failed, before, trust), PLAN
            )
            if plan.tier == "memory" and plan.step not in read:
                # Only now is it read, and held against its digests: it may be hundreds of GB.
                read.add(plan.step)
                checked = await self._stock(self._interrupted, plan.step)
                places = _replaced(places, plan.step, checked)
                if only is not None:
                    places = _only(places, [only])
                continue
            for passed in plan.passed[:NOTED]:
                boss.ledger.event(
                    "passed_over",
                    node=passed.node,
                    owner=passed.owner,
                    step=passed.step,
                    file=passed.file,
                    why=passed.why,
                )
            for passed in [p for p in plan.passed if p.why not in planner.FINE][:TOLD]:
                say(
                    f"checkpoints: a copy of rank {passed.owner}'s step {passed.step} on "
                    f"{passed.node} is bad and passed over: {passed.why}"
                )
            if plan.doubt:
                say(f"checkpoints: {plan.doubt}")
            bad = await self._fetch(plan.transfers)
            if not bad:
                self._plan, self._shards = plan, plan.all_shards()
                self.elsewhere.begin(plan if plan.copies else None, seats, self._shards)
                boss.ledger.event("restore", step=plan.step, tier=plan.tier, plan=plan.lines)
                if self.doubt and plan.doubt and plan.tier:
                    await self._leave_out(plan.step, places, on_disk)
                self.doubt = ""
                return not self._interrupted()
            failed |= bad
        say("checkpoints: no plan could be carried out; the ranks look on disk by themselves")
        return not self._interrupted()

    def _interrupted(self) -> bool:
        return bool(self._boss.state.failures) or self._boss.state.signalled > 0

    def _all_announced(self) -> bool:
        return all(len(node.stores) >= node.slots for node in self._boss.state.world.places)

    def _world(self) -> int:
        said = next((e.said.world for e in self._boss.checkpoints.ranks.values()), 0)
        return said or self._boss.state.world.size

    def _seats(self) -> dict[int, planner.Seat]:
        """Return each rank's next seat, as far as known: in its slot, or the one it had.

        A torchrun that numbers its nodes itself may put it elsewhere: see ``Elsewhere``.
        """
        places, slots = self._boss.state.world.places, self._boss.state.world.ranks
        known: dict[int, tuple[int, int]] = {}
        if self._world() == sum(map(len, slots)):  # else torchrun starts them
            known = {
                rank: (place, local)
                for place, numbers in enumerate(slots)
                for local, rank in enumerate(numbers)
            }
        known |= {r: (e.place, e.at.local) for r, e in self._boss.checkpoints.ranks.items()}
        return {
            rank: planner.Seat(StoreAt(places[place], local).name, places[place].name)
            for rank, (place, local) in known.items()
        }

    async def _leave_out(
        self,
        step: int,
        places: Sequence[planner.Place],
        on_disk: Sequence[tier.Committed],
    ) -> None:
        """Have no later recovery use what this one leaves out as it may be spoiled."""
        boss = self._boss
        newest = max([held.step for place in places for held in place.holdings], default=step)
        newest = max([newest, *(c.step for c in on_disk)])
        boss.state.nans.rewind(step, boss.state.world.epoch, newest)
        await boss.certificates.doubt(on_disk, step, self.doubt)

    async def _durable(self) -> list[tier.Committed]:
        directory = self._boss.checkpoints.directory
        if not directory:
            return []
        limit = self._boss.config.checkpoint_list_limit
        try:
            found, unreadable = await aside(lambda: tier.look(directory), limit)
        except (OSError, tier.DurableError, TimeoutError) as err:
            why = str(err) or f"no answer in {limit:g} s (checkpoint_list_limit)"
            say(f"checkpoints: cannot list {directory}: {why}")
            return []
        for step, why in unreadable.items():
            say(f"checkpoints: durable step {step} is passed over: {why}")
        return found

    # -- asking the stores

    async def _stock(
        self, over: Callable[[], bool], step: int | None = None
    ) -> list[planner.Place]:
        """Collect the holdings of all reachable stores; of leaving nodes only if these are quick.

        ``step``: of this step only, checked byte by byte; else nothing is read.
        """
        boss = self._boss
        nodes = [
            n
            for n in boss.state.nodes.values()
            if n.connection is not None and n.stores and boss.ending.answers(n)
        ]
        stores = self._stores(nodes).values()
        staying = {at.address for at in stores if not at.node.gone}
        # A node that does not answer to probes either is not waited for.
        everyone = {at.address for at in stores if not at.node.unreachable} | staying
        size = max((s.size for s in boss.checkpoints.saved.values()), default=0)
        limit = STOCK + (0.0 if step is None else 8 * size / STOCK_RATE)
        with boss.bus.ask(
            Stock, lambda token: [(node, TakeStock(token, step)) for node in nodes]
        ) as asked:
            await asked.until(lambda: over() or asked.answered(staying), limit)
            await asked.until(lambda: over() or asked.answered(everyone), LEAVING)
        return [self._place(StoreAt(node, stock.local), stock) for node, stock in asked.replies]

    def _place(self, at: StoreAt, stock: Stock) -> planner.Place:
        port = at.node.stores.get(at.local, 0)
        host = at.node.store_host or at.node.address
        return planner.Place(at.name, at.node.name, host, port, stock.held)

    def _stores(self, nodes: Iterable[Node] | None = None) -> dict[str, StoreAt]:
        """By name, all that can be reached; of these nodes only."""
        return {
            StoreAt(node, local).name: StoreAt(node, local)
            for node in (self._boss.state.nodes.values() if nodes is None else nodes)
            for local, port in node.stores.items()
            if port
        }

    async def _fetch(self, transfers: tuple[planner.Transfer, ...]) -> set[tuple[str, int, int]]:
        """Have the stores fetch; which (source, owner, step) could not be used."""
        if not transfers:
            return set()
        stores = self._stores()
        orders: dict[str, list[planner.Transfer]] = {}
        for transfer in transfers:
            orders.setdefault(transfer.target, []).append(transfer)

        def sent(token: int) -> Iterator[tuple[Node, Message]]:
            for target, group in orders.items():
                at = stores[target]
                items = tuple(Wanted(t.owner, t.step, t.host, t.port) for t in group)
                yield at.node, Fetch(token, at.local, items)

        wanted = {stores[target].address for target in orders}
        answers = await self._moved(sent, wanted, FETCH, self._interrupted)
        bad: set[tuple[str, int, int]] = set()
        sources = {(t.target, t.owner, t.step): t.source for t in transfers}
        for at, moved in answers:
            for done in moved.results:
                if not done.ok:
                    why = f"{at.node.name}: rank {done.owner}'s step {done.step}: {done.why}"
                    self._boss.news(why)
                    bad.add((sources[at.name, done.owner, done.step], done.owner, done.step))
        late = orders.keys() - {at.name for at, _ in answers}
        nodes = {stores[target].node.key: stores[target].node for target in late}
        if self._interrupted():
            return bad
        if len(nodes) == 1:  # it is the target that fails, not its sources
            # Nor is it known to be bad: its store may only be slow, or its way to a source.
            why = f"its store fetched no snapshots in {FETCH:g} s"
            (node,) = nodes.values()
            self._boss.state.lose(node, why, shared=True)
        elif nodes:  # what they share is slow: a source, or the network
            names = fold_hosts(sorted(node.name for node in nodes.values()))
            what = f"no snapshots came to {names} in {FETCH:g} s"
            self._boss.news(f"{what}: other copies are used, or those on disk")
            bad |= {(t.source, t.owner, t.step) for t in transfers if t.target in late}
        return bad

    async def _moved(
        self,
        orders: Callable[[int], Iterable[tuple[Node, Message]]],
        wanted: Set[Address],
        limit: float,
        over: Callable[[], bool],
    ) -> list[tuple[StoreAt, Moved]]:
        with self._boss.bus.ask(Moved, orders) as asked:
            await asked.until(lambda: over() or asked.answered(wanted), limit)
        return [(StoreAt(node, moved.local), moved) for node, moved in asked.replies]

    # -- to the durable tier

    @property
    def needed(self) -> bool:
        """True if there may be something to flush."""
        checkpoints = self._boss.checkpoints
        return bool(checkpoints.ranks and checkpoints.directory) and not self._boss.step.ended

    async def flush(self, limit: float) -> None:
        """Write the newest step that memory has whole to disk, if disk has none as new."""
        try:
            await self._flush(limit)
        except Exception as err:  # noqa: BLE001 - a slip here must not change how the job ends
            say(f"{INTERNAL}; the last step may not be on disk: {type(err).__name__}: {err}")

    async def _flush(self, limit: float) -> None:
        boss = self._boss
        if not self.needed:
            return
        until = time.monotonic() + limit

        def ended() -> bool:
            return boss.step.ended

        # The writer holds every byte against its digest before it writes it.
        places, on_disk = await asyncio.gather(self._stock(ended), self._durable())
        trust = boss.certificates.trust(places, on_disk, self.doubt)
        certified = bool(trust.why and (trust.memory or trust.disk))  # it alone may come last
        kept = [c for c in on_disk if not c.mark.doubt and (not certified or c.step in trust.disk)]
        steps = [(c.step, c.world) for c in kept]
        if certified:
            places = _only(places, trust.memory)
        before = boss.state.nans.bound
        flush = plan_flush(only_sound(places, before), self._world(), steps)
        if flush.writes and limit > SIGNALLED:  # time to see which copies are good
            checked = await self._stock(ended, flush.step)
            places = _replaced(places, flush.step, checked)
            if certified:
                places = _only(places, trust.memory)
            flush = plan_flush(only_sound(places, before), self._world(), steps)
        newest = max((c.step for c in kept), default=0)
        if flush.writes:
            left = max(1.0, until - time.monotonic())
            stores = self._stores()
            groups: dict[str, list[tuple[int, str]]] = {}
            for write in flush.writes:
                groups.setdefault(write.store, []).append((write.owner, write.file))
            all_ranks = self._world()

            def orders(token: int) -> Iterator[tuple[Node, Message]]:
                for store, owners in groups.items():
                    at = stores[store]
                    world = all_ranks if store == flush.committer else 0
                    yield at.node, Flush(token, at.local, flush.step, tuple(owners), world, left)

            wanted = {stores[store].address for store in groups}
            answers = await self._moved(orders, wanted, left + 1.0, ended)
            bad = [done.why for _, moved in answers for done in moved.results if not done.ok]
            if bad or len(answers) < len(groups):
                why = bad[0] if bad else "no answer in time"
                say(f"checkpoints: step {flush.step} was not written to disk: {why}")
            else:
                newest = flush.step
                say(f"checkpoints: step {flush.step} is on disk in {boss.checkpoints.directory}")
                await boss.certificates.mark(flush.step)
        if certified:
            await boss.certificates.doubt(on_disk, newest, trust.why)


def _only(places: list[planner.Place], states: Collection[tuple[int, int]]) -> list[planner.Place]:
    """The places with the copies of these (step, epoch) alone."""
    return [
        place._replace(holdings=[h for h in place.holdings if (h.step, h.epoch) in states])
        for place in places
    ]


def _replaced(
    places: list[planner.Place], step: int, checked: list[planner.Place]
) -> list[planner.Place]:
    """Return the known holdings of the stores, with those found when this step was read."""
    found = {place.store: place.holdings for place in checked}
    return [
        place._replace(
            holdings=[
                *(held for held in place.holdings if held.step != step),
                *found.get(place.store, ()),
            ]
        )
        for place in places
    ]
