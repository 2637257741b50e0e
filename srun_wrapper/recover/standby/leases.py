"""The job's lease: a standby node that waits warm for a fault, as long as nobody else needs it.

A lease is a request for a standby node that is made ahead of need, in a partition of its own, from
which Slurm takes the node back for whoever asks the pool for one. When it gets ranks, a second job
on its node keeps it (``standby/leases.py``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from robust_slurm.slurm import Job, Partition, SlurmError
from robust_slurm.slurm.run import without_slurm
from srun_wrapper.command import steps
from srun_wrapper.job.model import Role
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
from srun_wrapper.requeue.slurm_wait import LONGEST
from srun_wrapper.run_in_thread import run_in_thread
from standby import leases

EVERY = 60.0  # s between two looks at who may have a lease
SOON = 5.0  # s after which a lease that was used, or taken back, is replaced
RARELY = 600.0  # s between two looks for the partition, where there is none


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
        self._told = False
        self._cold = 0  # number of the last request that no lease served
        self._had = False
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
        has = any(not request.used for request, _ in self._requests.leases())
        if self._had and not has:
            self._next = min(self._next, now + SOON)
        self._had = has
        if now < self._next:
            return
        self._next = now + EVERY
        self._looking = self._beside(self._review())

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
        nodes, jobs, claims, job = await asyncio.gather(
            ask(slurm.nodes, LONGEST),
            ask(slurm.placements, LONGEST),
            ask(lambda: slurm.standby_claims(self._partition), LONGEST),
            ask(lambda: slurm.job(state.job_id), LONGEST),
        )
        self._job, self._until = job, partition
        held = leases.held_nodes(self._partition, jobs.values())
        open_claims = [c for c in claims if not held.intersection(c.nodes)]
        leased = [name for c in open_claims if c.state == "RUNNING" for name in c.nodes]
        count = leases.leasable(partition, nodes, leased, held)
        wishes = leases.wishes(leases.LeaseWish(state.job_id, len(job.nodes)), open_claims, jobs)
        if state.job_id not in leases.entitled(wishes, count):
            self._give_back(own, f"{count} nodes for {len(wishes)} jobs")
        elif any(node is not None and node.name not in partition.nodes for _, node in own):
            self._give_back(own, "its node has left the pool")
        elif not own and not state.failures and state.world.resized is None:
            # A job that lacks nodes waits for one of the pool, which would preempt its own lease.
            usable = [nodes[n] for n in partition.nodes if n in nodes and nodes[n].usable]
            self._size = size = LeaseSize(*leases.smallest(usable))
            tasks = max(map(len, state.world.ranks), default=1)
            without = [*dict.fromkeys([*self._barred.bad, *self._requests.unfit.names()])]
            minutes = standby_minutes(job, partition, time.time())
            launch = self._requester.launch
            argv = lease_argv(launch, job, self._partition, tasks, without, minutes, size)
            self._journal.event("lease_asked", tasks=tasks)
            await self._requests.lease(tasks, argv)

    def _give_back(self, own: list[tuple[StandbyRequest, Any]], why: str) -> None:
        for request, node in own:
            self._journal.event("lease_given_back", node=node.name if node else "", why=why)
            self._requests.drop(request.number)

    # -- use

    def _used(self, request: StandbyRequest) -> None:
        """A standby node gets ranks: keep the node, if it is a lease."""
        self._next = time.monotonic() + SOON
        if request.lease:
            self._beside(self._hold(request))
        else:
            self._cold = request.number

    def _tell(self) -> None:
        """Say once what a node that has taken a place without a lease has cost."""
        nodes = self._state.nodes.values()
        came = self._cold and any(
            n.companion == self._cold and n.role is Role.ACTIVE for n in nodes
        )
        if came and self._obstacle and not self._told:
            self._told = True
            say(
                "the standby node starts cold; an idle one can wait warm, as a spare does "
                f"(robust-standby apply --lease {self._partition}): {self._obstacle}"
            )

    async def _hold(self, request: StandbyRequest) -> None:
        """Have a job of ours on its node that is not preempted, until the lease ends."""
        node = next(n for n in self._state.nodes.values() if n.companion == request.number)
        taken = f"{node.name} may be taken away for another job: srun could not keep it"
        assert self._job is not None and self._until is not None
        minutes = standby_minutes(self._job, self._until, time.time())
        argv = hold_argv(
            self._job, leases.held(self._partition), node.name, minutes, self._size.cpus
        )
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
        await hold.wait()
        if node.role is Role.ACTIVE and not self._state.ending and not request.ended:
            say(taken)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Ask for nothing more."""
        self._off = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
