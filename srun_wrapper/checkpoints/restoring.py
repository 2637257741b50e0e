"""Before an epoch: find what the ranks can be restored from and bring it where it is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from functools import partial

from robust_slurm.checkpoint.durable import tier
from robust_slurm.checkpoint.planning import plan as planner
from robust_slurm.checkpoint.planning.sound import Bound, Trust, only_sound
from robust_slurm.checkpoint.store.events import Restore
from srun_wrapper.checkpoints.certificates import Certificates
from srun_wrapper.checkpoints.enrolments import EarlierWorld, Enrolments, StoreAt
from srun_wrapper.checkpoints.late_arrivals import LateArrivals
from srun_wrapper.checkpoints.on_disk import committed, only, replaced
from srun_wrapper.checkpoints.stores import Copy, Stores
from srun_wrapper.job.model import Node
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.run_in_thread import run_in_thread

ANNOUNCE = 10.0  # s for the stores of a node that has just joined to report their ports
TRIES = 8  # plans in one recovery: what is bad shows only when it is read or fetched
PLAN = 120.0
TOLD = 8  # bad copies that are reported to the user
NOTED = 64  # copies passed over that are noted one by one


class Restoring:
    """Makes the restore plan of the next epoch."""

    def __init__(
        self,
        state: JobState,
        enrolments: Enrolments,
        certificates: Certificates,
        stores: Stores,
        journal: Journal,
    ) -> None:
        self._state = state
        self._enrolments = enrolments
        self._certificates = certificates
        self._stores = stores
        self._journal = journal
        self._plan: planner.Resume | None = None
        self._shards: dict[str, dict[int, str]] = {}  # of each node
        self._earlier: EarlierWorld | None = None  # whose snapshots the plan uses
        self.late_arrivals = LateArrivals(self._fetch, self._interrupted, journal)

    def of(self, node: Node) -> Restore | None:
        """Return the restore order for a node's ranks; None if nothing is restored."""
        plan = self._plan
        if plan is None or not plan.tier:
            return None
        return Restore(plan.step, plan.tier, self._shards.get(node.name, {}), *self._origins())

    def _origins(self) -> tuple[dict[int, int], tuple[int, ...]]:
        """Return the ranks' origins in a world of another size; see ``Restore``."""
        if (earlier := self._earlier) is None:
            return {}, ()
        own = {rank: owners[0] for rank, owners in earlier.owners.items()}
        return own, tuple(sorted(earlier.anew))

    @property
    def step(self) -> int | None:
        """Step that the next epoch resumes from; None if it starts from nothing."""
        return self._plan.step if self._plan is not None and self._plan.tier else None

    @property
    def from_memory(self) -> bool:
        return self._plan is not None and self._plan.tier == "memory"

    @property
    def lines(self) -> tuple[str, ...]:
        return self._plan.lines if self._plan is not None else ()

    async def prepare(self) -> bool:
        """Plan the restore and fetch what it needs; False if a failure or the end came between."""
        self._plan, self._earlier = None, None
        self.late_arrivals.begin(None, {}, {})
        try:
            return await self._prepare()
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            text = f"{type(err).__name__}: {err}"
            say(f"checkpoints: internal error; each rank looks for its state on disk: {text}")
            return not self._interrupted()

    async def _prepare(self) -> bool:
        state, certificates = self._state, self._certificates
        if not self._enrolments.ranks:
            return not self._interrupted()
        await state.until(lambda: self._interrupted() or self._all_announced(), ANNOUNCE)
        places, on_disk = await asyncio.gather(
            self._stores.stock(self._interrupted),
            committed(self._enrolments.directory, state.config.checkpoint_list_limit),
        )
        steps = [(c.step, c.world) for c in on_disk]
        seats = self._seats()
        if len(seats) < self._world():
            # Some of torchrun's ranks have never enrolled, so their seats are not known.
            return not self._interrupted()
        stores = self._stores.reachable()
        without = sorted({seat.node for seat in seats.values() if seat.store not in stores})
        if without and places:
            where = ",".join(without)
            say(f"checkpoints: no in-memory store on {where}; all ranks restore from disk")
            places = []  # its ranks could not be given what the others have
        failed: set[tuple[str, int, int]] = set()
        read: set[int] = set()
        for _ in range(TRIES):
            if self._interrupted():
                return False
            before = certificates.bound()
            trust = certificates.trust(places, on_disk)
            plan, self._earlier = await run_in_thread(
                partial(self._newest, places, seats, steps, failed, before, trust), PLAN
            )
            if plan.tier == "memory" and plan.step not in read:
                # Only now is it read, and held against its digests: it may be hundreds of GB.
                read.add(plan.step)
                checked = await self._stores.stock(self._interrupted, plan.step)
                places = replaced(places, plan.step, checked)
                continue
            self._report(plan)
            bad = await self._fetch(plan.transfers)
            if not bad:
                self._plan, self._shards = plan, plan.all_shards()
                self.late_arrivals.begin(plan if plan.copies else None, seats, self._shards)
                self._journal.event("restore", step=plan.step, tier=plan.tier, plan=plan.lines)
                if certificates.suspicion and plan.doubt and plan.tier:
                    limit = state.config.checkpoint_list_limit
                    # A commit may have ended since the first list.
                    on_disk = await committed(self._enrolments.directory, limit) or on_disk
                    await self._leave_out(plan.step, places, on_disk)
                certificates.trust_again()
                return not self._interrupted()
            failed |= bad
        say("checkpoints: no restore plan succeeded; each rank looks for its state on disk")
        return not self._interrupted()

    def _newest(
        self,
        places: Sequence[planner.Holder],
        seats: Mapping[int, planner.Seat],
        steps: Sequence[tuple[int, int]],
        failed: Set[Copy],
        before: Bound | None,
        trust: Trust,
    ) -> tuple[planner.Resume, EarlierWorld | None]:
        """Return the plan with the newest step, and the world that saved it if not the present one.

        See ``planner.plan``. A state of any world that is not in doubt comes before one that is.
        """
        world, earlier = self._world(), self._enrolments.earlier
        if not earlier:
            return planner.plan(places, seats, world, steps, failed, before, trust), None

        def of_worlds(
            known: Sequence[planner.Holder],
        ) -> tuple[planner.Resume, EarlierWorld | None]:
            """Return the newest of the plans of all worlds."""
            found: list[tuple[planner.Resume, EarlierWorld | None]] = []
            for each in (None, *earlier):
                size = world if each is None else each.size
                own = [
                    place._replace(holdings=[h for h in place.holdings if h.world == size])
                    for place in known
                ]
                asked = None if each is None else each.owners
                plan = planner.plan(own, seats, size, steps, failed, before, trust, asked)
                found.append((plan, each if plan.tier == "memory" else None))
            return max(found, key=lambda one: (one[0].step, one[0].tier == "memory"))

        undoubted: list[Sequence[planner.Holder]] = []
        if trust.why and trust.memory:
            undoubted.append(only(list(places), trust.memory))
        if before is not None:
            undoubted.append(only_sound(places, before))
        for some in undoubted:
            best = of_worlds(some)
            if best[0].tier == "memory":
                return best
        return of_worlds(places)

    def _report(self, plan: planner.Resume) -> None:
        """Report the copies that the plan passes over, and why."""
        for passed in plan.passed[:NOTED]:
            self._journal.event(
                "passed_over",
                node=passed.node,
                owner=passed.owner,
                step=passed.step,
                file=passed.file,
                why=passed.why,
            )
        for passed in [p for p in plan.passed if p.why not in planner.FINE][:TOLD]:
            say(
                f"checkpoints: the copy of rank {passed.owner}'s step {passed.step} on "
                f"{passed.node} is damaged and not used: {passed.why}"
            )
        if plan.doubt:
            say(f"checkpoints: {plan.doubt}")

    async def _fetch(self, transfers: Sequence[planner.Transfer]) -> set[Copy]:
        return await self._stores.fetch(transfers, self._interrupted)

    def _interrupted(self) -> bool:
        return bool(self._state.failures) or self._state.signalled > 0

    def _all_announced(self) -> bool:
        return all(len(node.stores) >= node.slots for node in self._state.world.places)

    def _world(self) -> int:
        return self._enrolments.world or self._state.world.size

    def _seats(self) -> dict[int, planner.Seat]:
        """Return each rank's next seat, as far as known: in its slot, or the one it had.

        A torchrun that numbers its nodes itself may put it elsewhere: see ``LateArrivals``.
        """
        places, slots = self._state.world.places, self._state.world.ranks
        known: dict[int, tuple[int, int]] = {}
        if self._world() == sum(map(len, slots)):  # else torchrun starts them
            known = {
                rank: (place, local)
                for place, numbers in enumerate(slots)
                for local, rank in enumerate(numbers)
            }
        known |= {r: (e.place, e.at.local) for r, e in self._enrolments.ranks.items()}
        return {
            rank: planner.Seat(StoreAt(places[place], local).name, places[place].name)
            for rank, (place, local) in known.items()
        }

    async def _leave_out(
        self,
        step: int,
        places: Sequence[planner.Holder],
        on_disk: Sequence[tier.DurableStep],
    ) -> None:
        """Keep later recoveries from the states that this one leaves out as they may be spoiled."""
        newest = max([held.step for place in places for held in place.holdings], default=step)
        newest = max([newest, *(c.step for c in on_disk)])
        self._state.nonfinite.rewind(step, self._state.world.epoch, newest)
        await self._certificates.doubt(on_disk, step, self._certificates.suspicion)
