"""The job's lease: a standby node that waits warm for a fault, as long as nobody else needs it.

A lease is a request for a standby node that is made ahead of need, in a partition of its own, from
which Slurm takes the node back for whoever asks the pool for one. When it gets ranks, a second job
on its node keeps it (``standby/leases.py``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from robust_slurm.slurm import Job, Partition, SlurmError
from robust_slurm.slurm.run import without_slurm
from srun_wrapper.command import steps
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.recover.standby.asking import StandbyRequests
from srun_wrapper.recover.standby.lease_argv import LeaseSize, hold_argv, lease_argv
from srun_wrapper.recover.standby.request import (
    Barred,
    Requester,
    StandbyRequest,
    standby_minutes,
)
from srun_wrapper.requeue.slurm_wait import LONGEST, minutes
from srun_wrapper.run_in_thread import run_in_thread
from srun_wrapper.start_task import start_task
from standby import leases

EVERY = 60.0  # s between two looks at who may have a lease
SOON = 5.0  # s after which a lease that was used, or taken back, is replaced
RARELY = 600.0  # s between two looks for the partition, where there is none
LASTS = 600.0  # s that a lease must last; after a shorter one the next is requested later
MOST_DOUBLED = 7  # times that this wait is doubled, at most
HOLDS = 15.0  # s within which the job that keeps a node should run


class Leases:
    """Keeps one lease for the job while it is entitled to one; gives it back when it is not."""

    def __init__(
        self,
        state: JobState,
        requests: StandbyRequests,
        requester: Requester,
        barred: Barred,
        journal: Journal,
        allowed: Callable[[], bool],
    ) -> None:
        """``allowed``: whether standby nodes may be used at all."""
        config = state.config
        self._state = state
        self._requests = requests
        self._requester = requester
        self._slurm = requester.slurm
        self._barred = barred
        self._journal = journal
        self._allowed = allowed
        self._pool, self._partition = config.standby_partition, config.lease_partition
        self._off = not self._pool or not self._partition or requester.launch.observed is not None
        self._obstacle = ""
        self._cold = 0  # number of the last request that no lease served
        self._told = self._told_refused = False
        self._mine: StandbyRequest | None = None  # the lease without ranks, or the request for it
        self._short = 0  # leases in a row that ended soon, and unused
        self._next = 0.0
        self._job: Job | None = None
        self._until: Partition | None = None  # its longest time is that of the leases
        self._size = LeaseSize(1, 0)
        self._looking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        requests.on_used = self._used

    def look(self, now: float) -> None:
        """Called all the time while the job's ranks run; returns at once."""
        busy = self._looking is not None and not self._looking.done()
        if self._off or busy or not self._state.progress.beats:
            return
        self._tell()
        if self._mine is not None and self._own() is None:
            self._ended(self._mine, now)
        if now < self._next:
            return
        self._next = now + EVERY
        self._looking = start_task(self._tasks, self._review())

    def _own(self) -> StandbyRequest | None:
        return next((r for r, _ in self._requests.leases() if not r.used), None)

    def _ended(self, lease: StandbyRequest, now: float) -> None:
        """Note that Slurm has ended the lease; if leases do not last, wait longer for the next."""
        self._mine = None
        if lease.used:
            return
        self._short = self._short + 1 if now - lease.since < LASTS else 0
        times = 2.0 ** min(max(0, self._short - 1), MOST_DOUBLED)
        if lease.outcome != "refused":
            self._next = now + min(SOON * times, RARELY)
            return
        self._next = now + RARELY * times  # srun says each time why
        if not self._told_refused:
            self._told_refused = True
            say(
                "Slurm refuses a standby node that would wait warm (srun's message above has the "
                f"reason): asked again in {minutes(RARELY)}, then less and less often"
            )

    # -- one lease, or none

    async def _review(self) -> None:
        try:
            await self._settle()
        except (SlurmError, TimeoutError, OSError) as err:
            self._journal.news(f"no look at leases: {err}")

    async def _settle(self) -> None:
        state, slurm, ask = self._state, self._slurm, run_in_thread
        partitions = await ask(slurm.partitions, LONGEST)
        config = await ask(slurm.config, LONGEST) if self._partition in partitions else {}
        self._obstacle = leases.obstacle(self._partition, self._pool, partitions, config)
        own = [(r, node) for r, node in self._requests.leases() if not r.used]
        if self._obstacle or not self._allowed():
            self._give_back(own, self._obstacle or "standby nodes cannot be used")
            self._next = time.monotonic() + RARELY
            return
        partition = partitions[self._partition]
        nodes, claims, job = await asyncio.gather(
            ask(lambda: slurm.nodes(partition.nodes), LONGEST),
            ask(lambda: slurm.standby_claims(self._partition), LONGEST),
            ask(lambda: slurm.job(state.job_id), LONGEST),
        )
        self._job, self._until = job, partition
        able = {name for name in partition.nodes if name in nodes and nodes[name].usable}
        if any(node is not None and node.name not in able for _, node in own):
            self._give_back(own, "its node has left the pool, or is out of service")
            return
        wanted = any(c.state == "PENDING" for c in claims if c.of != state.job_id)
        if any(node is not None for _, node in own) and not wanted:
            return
        if await self._silent(own):
            self._give_back(own, "no message from robust-task")
            return
        jobs = await ask(slurm.placements, LONGEST)
        held = leases.held_nodes(self._partition, jobs.values())
        open_claims = [c for c in claims if not held.intersection(c.nodes)]
        leased = [name for c in open_claims if c.state == "RUNNING" for name in c.nodes]
        found = leases.alike(nodes[name] for name in partition.nodes if name in nodes)
        count = leases.leasable(found.nodes, leased, held)
        wishes = leases.wishes(leases.LeaseWish(state.job_id, len(job.nodes)), open_claims, jobs)
        if state.job_id not in leases.entitled(wishes, count):
            self._give_back(own, f"{count} nodes for {len(wishes)} jobs")
        elif not own and not state.failures and state.world.resized is None:
            # A job that lacks nodes waits for one of the pool, which would preempt its own lease.
            self._size = size = LeaseSize(found.cpus, found.memory)
            tasks = max(map(len, state.world.ranks), default=1)
            other = [n for n in sorted(able) if nodes[n] not in found.nodes]  # of another size
            without = [*self._barred.bad, *self._requests.unfit.names(), *other]
            without = [*dict.fromkeys(without)]
            limit = standby_minutes(job, partition, time.time())
            launch = self._requester.launch
            argv = lease_argv(launch, job, self._partition, tasks, without, limit, size)
            self._journal.event("lease_asked", tasks=tasks)
            await self._requests.lease(tasks, argv)
            self._mine = self._own()

    async def _silent(self, own: list[tuple[StandbyRequest, Node | None]]) -> bool:
        """Return whether a lease has a node on which robust-task should have reported."""
        waits = next((request for request, node in own if node is None), None)
        if waits is None:
            return False
        name = steps.standby_job_name(self._state.job_id)
        jobs = await run_in_thread(lambda: self._slurm.allotted(name), LONGEST)
        now = time.monotonic()
        waits.update(jobs, now)
        came = any(node.standby_request == waits.number for node in self._state.nodes.values())
        if came or not waits.silent(now, self._state.config.standby_start_limit):
            return False
        self._requests.unfit.note_silent(waits, now)
        return True

    def _give_back(self, own: list[tuple[StandbyRequest, Node | None]], why: str) -> None:
        self._mine = None
        for request, node in own:
            self._journal.event("lease_given_back", node=node.name if node else "", why=why)
            self._requests.drop(request.number)

    # -- use

    def _used(self, request: StandbyRequest) -> None:
        """A standby node gets ranks: keep the node, if it is a lease."""
        self._next = time.monotonic() + SOON
        nodes = [n for n in self._state.nodes.values() if n.standby_request == request.number]
        if request.lease:
            start_task(self._tasks, self._hold(request))
        elif not any(ready for node in nodes for ready in node.warm.values()):
            self._cold = request.number

    def _tell(self) -> None:
        """Print, once, that a node without a lease started cold, and why there was no lease."""
        nodes = self._state.nodes.values()
        came = self._cold and any(
            n.standby_request == self._cold and n.role is Role.ACTIVE for n in nodes
        )
        if came and self._obstacle and not self._told:
            self._told = True
            say(
                "the standby node starts cold; an idle one can wait warm, as a spare does "
                f"(robust-standby apply --lease {self._partition}): {self._obstacle}"
            )

    async def _hold(self, request: StandbyRequest) -> None:
        """Have a job of ours on its node that is not preempted, until the lease ends."""
        node = next(n for n in self._state.nodes.values() if n.standby_request == request.number)
        taken = f"{node.name} may be taken away for another job: srun could not keep it"
        assert self._job is not None and self._until is not None
        limit = standby_minutes(self._job, self._until, time.time())
        argv = hold_argv(self._job, leases.held(self._partition), node.name, limit, self._size)
        env = without_slurm(self._requester.launch.env)
        try:
            request.hold = hold = await steps.start(
                argv, env, own_session=True, stdin=asyncio.subprocess.DEVNULL
            )
        except OSError as err:
            say(f"{taken} ({err})")
            return
        if self._requests.get(request.number) is None:
            request.let_go()
        told = False
        try:
            await asyncio.wait_for(hold.wait(), HOLDS)
        except TimeoutError:
            if told := await self._waits(hold.pid):
                say(taken)
            await hold.wait()
        if node.role is Role.ACTIVE and not self._state.ending and not request.ended and not told:
            say(taken)

    async def _waits(self, session: int) -> bool:
        """Return whether an srun of ours is still in Slurm's queue."""
        name = steps.standby_job_name(self._state.job_id)
        try:
            jobs = await run_in_thread(lambda: self._slurm.allotted(name), LONGEST)
        except (SlurmError, TimeoutError):
            return False
        return any(job.session == session and job.state == "PENDING" for job in jobs)

    async def close(self) -> None:
        """Ask for nothing more."""
        self._off = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
