"""A job that checks its steps: ranks and stores that obey at once and compute as told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkpointed_job import CheckpointedJob
from made_job import made_stalls

from robust_slurm.checkpoint.format.state_sum import StateSum
from robust_slurm.checkpoint.store.events import FetchOutcome, Holding
from srun_wrapper.checkpoints.verify.check import Evict, StateCheck, Test
from srun_wrapper.checkpoints.verify.recomputing import Recomputing
from srun_wrapper.checkpoints.verify.standing import Standing
from srun_wrapper.checkpoints.verify.verifying import Verify
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.orders.machine_tests import MachineResults
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.protocol.checkpoint_messages import (
    Enrolled,
    Fetch,
    Moved,
    Saved,
    StandAt,
    StateSums,
    Stock,
    StoreReady,
    TakeStock,
    TakeSums,
)
from srun_wrapper.protocol.messages import Message, Stop

EVERY, STEP = 10, 20
FINE = MachineResults({}, ("all passed",))


def verify_of(
    job: CheckpointedJob, start_epoch: Callable[[str], None], test: Test, evict: Evict, phase: Phase
) -> Verify:
    """Return the real Verify of a made-up job."""
    state, journal = job.state, job.journal
    standing = Standing(state, job.enrolments, job.checkpoints.schedule)
    recomputing = Recomputing(
        state,
        standing,
        job.stores,
        job.restoring,
        Stopping(state, made_stalls(state)),
        journal,
        pod=job.topology.pod,
        start_epoch=start_epoch,
        interrupted=lambda: bool(state.failures) or state.signalled > 0,
    )
    check = StateCheck(state, recomputing, test, evict, job.certificates, journal)
    return Verify(state, standing, recomputing, check, journal, phase)


class Site(CheckpointedJob):
    """Four nodes, the last ``spares`` of them without ranks; each rank saves every step."""

    def __init__(self, *sums: int, spares: int = 0, stop_tests: float = 60.0) -> None:
        """``sums``: what the state comes to in the first epoch, the second, the third."""
        super().__init__(verify_every=EVERY, stop_tests=stop_tests)
        self.sums = sums
        self.places: list[list[str]] = []  # of each epoch
        self.tests: list[tuple[str, ...]] = []  # nodes that were tested
        self.left: list[str] = []
        self.found: MachineResults | None = FINE
        self.on_stop: Callable[[], None] = lambda: None
        self.on_sums: Callable[[], None] = lambda: None
        self.steps_in_memory = (STEP - 1, STEP)
        self._held: dict[str, list[tuple[int, int, int]]] = {}
        self.phase = Phase()
        self.phase.name = "running"
        self.verify = verify_of(self, self.begin_epoch, self._test, self._evict, self.phase)
        for node in self.nodes[4 - spares :]:
            self.state.members.move(node, Role.SPARE)
        active = self.nodes[: 4 - spares]
        for node in self.nodes:
            self.checkpoints.heard(node, StoreReady(1, 0, 8000))
        self.state.members.lay_out(list(active), [(i,) for i in range(len(active))])
        self.begin_epoch("")

    def begin_epoch(self, _reason: str) -> None:
        """All ranks come to ``STEP`` at once."""
        state = self.state
        epoch, restored = state.new_epoch(), self.restoring.step
        self.checkpoints.new_epoch(restored or 0, from_memory=self.restoring.from_memory)
        self.verify.begin()
        self.places.append([node.name for node in state.world.places])
        world = state.world.size
        self.checkpoints.replicas.placed = epoch  # where replicas go is not asked here
        for rank, node in enumerate(state.world.places):
            said = Enrolled(2 * epoch, epoch, 0, rank, world, {}, (rank,), "", 0, 1000)
            self.checkpoints.heard(node, said)
            held = self._held.setdefault(node.name, [])
            held += [(rank, step, epoch) for step in self.steps_in_memory]
            if epoch > 1:
                saved = Saved(epoch, rank, STEP, None, 1000, 0.0, 0.0)
                self.checkpoints.heard(node, saved)

    def stand(self) -> None:
        """Ask for a check, and have all ranks stand."""
        epoch = self.state.world.epoch
        for step in (STEP - 8, STEP):
            for rank, node in enumerate(self.state.world.places):
                saved = Saved(epoch, rank, step, None, 1000, 0.0, 0.0)
                self.checkpoints.heard(node, saved)
            self.verify.look(0.0)

    async def check(self) -> str:
        """The outcome of one."""
        self.stand()
        assert self.verify.ready
        await self.verify.run()
        assert self.state.failures or self.asked()[-1] == -1
        return str([what["outcome"] for name, what in self.events if name == "check"][-1])

    def asked(self) -> list[int]:
        return [order.step for _, order in self.sent if isinstance(order, StandAt)]

    def obey(self, node: Node, message: Message) -> None:
        if isinstance(message, Stop):
            node.stopped = message.epoch
            self.on_stop()
        elif isinstance(message, TakeStock):
            held = tuple(
                Holding(owner, step, self.state.world.size, (owner,), "memory",
                        f"{owner}-{step}-{epoch}", 9, True, "", epoch)
                for owner, step, epoch in self._held.get(node.name, [])
                if message.step in (None, step)
            )  # fmt: skip
            self.bus.deliver(node, Stock(message.token, 0, held))
        elif isinstance(message, Fetch):
            done = tuple(
                FetchOutcome(w.owner, w.step, True, "", "got", 0.0, 9) for w in message.items
            )
            self.bus.deliver(node, Moved(message.token, 0, done))
        elif isinstance(message, TakeSums) and node in self.state.world.places:
            epoch, rank = self.state.world.epoch, self.state.world.places.index(node)
            if rank == 0:
                self.on_sums()
            crc = self.sums[min(epoch, len(self.sums)) - 1]
            found = (StateSum(rank, epoch, 1, crc, 7),)
            self.bus.deliver(node, StateSums(message.token, 0, found))

    async def _test(self, names: Sequence[str], _symptom: str) -> MachineResults | None:
        self.tests.append(tuple(names))
        return self.found

    def _evict(self, names: tuple[str, ...], _incident: object) -> None:
        self.left += names
