"""Requests for standby nodes: made, judged when they end, and given back when not needed.

A standby allocation belongs to an srun of ours (decision 2). It is requested when a node is in
doubt; if that turns out wrong, it is given back unused. A pending request is used before another
is made, so one fault never costs two nodes.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from robust_slurm.slurm import Allotted, SlurmError
from robust_slurm.slurm.run import without_slurm
from srun_wrapper.command import steps
from srun_wrapper.decide.exclusions import exclusions
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Finish
from srun_wrapper.recover.standby.request import (
    Barred,
    Outcome,
    Requester,
    StandbyRequest,
    held_up,
    outcome,
    standby_minutes,
    unmatched,
)
from srun_wrapper.recover.standby.unfit import UnfitNodes
from srun_wrapper.requeue.slurm_wait import LONGEST, SlurmWait
from srun_wrapper.run_in_thread import run_in_thread
from srun_wrapper.start_task import start_task

AT_ONCE = 2  # s within which Slurm must give the node that suits best
AGAIN = 5.0  # s until Slurm is asked again for what it did not give
ASK = 3.0  # s for Slurm to say why it gives none, or which node it has given
END = 3.0  # s for requests to end by themselves, and again after SIGTERM

T = TypeVar("T")
Wanted = tuple[int, str]
"""Number of ranks, and the lost node that they were on."""


class StandbyRequests:
    """Requests standby nodes, and releases those that are not needed."""

    def __init__(
        self,
        state: JobState,
        requester: Requester,
        slurm: SlurmWait,
        journal: Journal,
        barred: Barred,
    ) -> None:
        self._state = state
        self._config = state.config
        self._nodes = state.nodes
        self._awaited = state.awaited
        self._requester = requester
        self._door = requester.slurm
        self._slurm = slurm
        self._outage = slurm.outage
        self._journal = journal
        self._barred = barred
        self.unfit = UnfitNodes()
        self._numbers = itertools.count(1)
        self._requests: dict[int, StandbyRequest] = {}
        self.asking: asyncio.Task[str] | None = None  # ahead of need
        self._next_ask = self._wanted_at = 0.0  # when Slurm may be asked; when a node was in doubt
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._leaving: list[StandbyRequest] = []  # their nodes were told to finish
        self._told: set[str] = set()  # slips of ours
        self.on_used: Callable[[StandbyRequest], None] = lambda _request: None

    def get(self, number: int) -> StandbyRequest | None:
        """Return a request; None if it was dropped."""
        return self._requests.get(number)

    def told(self, why: str) -> bool:
        """Return True if the user knows of it already."""
        return why in self._told

    # -- ahead of need

    def prerequest(self, wanted: list[Wanted], suspects: list[str]) -> None:
        """Request nodes in place of ``wanted``, which are in doubt; []: none is any more.

        ``suspects`` must not be granted. Called all the time. Requests outlive the doubt by AGAIN.
        """
        asking = self.asking is not None and not self.asking.done()
        if asking or not self._config.standby_partition:
            return
        self._sweep()
        now = time.monotonic()
        self._wanted_at = now if wanted else self._wanted_at
        if len(self._unused()) < len(wanted):
            if now < self._next_ask:
                return
            self._next_ask = now + AGAIN
            self._journal.event("standby_requested", suspects=suspects)
            self.asking = asyncio.create_task(self.ask_for(wanted, suspects))
        elif now - self._wanted_at >= AGAIN:
            self.send_away()

    def send_away(self) -> None:
        """Withdraw the requests for standby nodes that are not needed; leases stay."""
        for request in self._unused():
            if not request.lease:
                self._journal.event("standby_request_withdrawn", number=request.number)
                self.drop(request.number)

    def _unused(self) -> list[StandbyRequest]:
        """Return the requests that may still serve; of leases, those whose node has reported."""
        came = {n.standby_request for n in self._nodes.values() if n.connection and not n.gone}
        requests = [r for r in self._requests.values() if not r.used]
        return [r for r in requests if not r.lease or r.number in came]

    def _sweep(self) -> None:
        """Drop the requests that ended, or whose node was lost, before they were needed."""
        lost = {n.standby_request for n in self._nodes.values() if n.gone}
        for request in [r for r in self._requests.values() if not r.used]:
            if request.number in lost or (request.ended and request.outcome != "waiting"):
                if request.outcome == "unfit":
                    self.unfit.note_ended(request)
                self.drop(request.number)

    async def ask_for(
        self, wanted: list[Wanted], suspects: list[str], over: Callable[[], bool] | None = None
    ) -> str:
        """Request a node for each that no unused request fits; return why that failed, or "".

        With ``over`` it waits for Slurm while that is away, until ``over()``.
        """
        try:
            return await self._request(wanted, suspects, over)
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            text = f"internal error while asking for a node: {type(err).__name__}: {err}"
            if text not in self._told:
                self._told.add(text)
                say(text)
            return text

    async def _request(
        self, wanted: list[Wanted], suspects: list[str], over: Callable[[], bool] | None
    ) -> str:
        self._sweep()
        missing = unmatched(wanted, [r.tasks for r in self._unused()])
        if not missing:
            return ""
        leased = [node.name for _, node in self.leases() if node is not None]
        without = [*self._barred.bad, *suspects, *self.unfit.names(), *leased]
        partition, slurm = self._config.standby_partition, self._door
        try:
            job, partitions, nodes = await asyncio.gather(
                self._question(lambda: slurm.job(self._state.job_id), over),
                self._question(slurm.partitions, over),
                self._question(slurm.nodes, over),
            )
        except (SlurmError, TimeoutError) as err:
            return f"cannot ask for a standby node: {err}"
        if partition not in partitions:
            return f"no partition {partition!r} to take a node from (standby_partition)"
        minutes = standby_minutes(job, partitions[partition], time.time())
        free = [n.name for n in nodes.values() if n.idle and partition in n.partitions]
        free = [name for name in free if name not in without]
        kept, _ = exclusions(self._barred.earlier, set(free), len(missing))
        without = list(dict.fromkeys([*without, *kept]))
        idle = [name for name in free if name not in without]
        best = self._requester.prefer([name for _, name in missing], idle)
        launch = self._requester.launch
        try:
            for tasks, name in missing:
                argv = steps.standby_argv(launch, job, partition, tasks, without, minutes)
                now = f"--immediate={AT_ONCE}"
                prefer = [f"--nodelist={best[name]}", now] if name in best else []
                await self._start(StandbyRequest(next(self._numbers), tasks, argv, prefer))
        except OSError as err:
            return f"cannot run srun for a standby node: {err}"
        return ""

    async def _question(self, ask: Callable[[], T], over: Callable[[], bool] | None) -> T:
        if over is None:
            return await run_in_thread(ask, LONGEST)
        return await self._slurm.call("get a standby node", ask, over)

    async def _start(self, request: StandbyRequest) -> None:
        launch, number = self._requester.launch, request.number
        task = steps.task_words(launch, self._config.task_python)
        env = {**without_slurm(launch.env), **self._requester.secrets.env(number)}
        self._awaited.add(number)
        self._requests[number] = request
        request.process, request.since = None, time.monotonic()
        request.outages = self._outage.count
        argv = [request.argv[0], *request.prefer, *request.argv[1:], *task]
        try:
            # Only the job's own srun reads our stdin.
            request.process = process = await steps.start(
                argv, env, own_session=True, stdin=asyncio.subprocess.DEVNULL
            )
        finally:
            if request.process is None:
                self.drop(number)
        if number not in self._requests:  # not wanted any more, meanwhile
            request.terminate()
        start_task(self._tasks, self._notice_end(request, process))

    async def _notice_end(
        self, request: StandbyRequest, process: asyncio.subprocess.Process
    ) -> None:
        await process.wait()
        request.let_go()
        joined = any(n.standby_request == request.number for n in self._nodes.values())
        if not joined and request.number in self._requests:
            found = await self._judge(request)
            preferred, request.prefer = request.prefer, []
            if preferred and found != "unfit" and request.number in self._requests:
                try:
                    await self._start(request)  # Somebody was quicker: any node will do.
                except OSError as err:
                    say(f"cannot run srun for a standby node: {err}")
            else:
                request.outcome = found
        request.prefer = [] if joined else request.prefer
        self._state.changed.set()

    async def _judge(self, request: StandbyRequest) -> Outcome:
        """Learn what became of a request whose srun has ended before robust-task reported."""
        lasted = time.monotonic() - request.since
        try:
            jobs = await self._slurm.call("read which standby node Slurm allocated", self._allotted)
        except SlurmError:
            return "refused"
        away = self._outage.count != request.outages
        code = request.process.returncode if request.process is not None else None
        return outcome(request.update(jobs, time.monotonic()), code or 0, lasted, away)

    # -- what became of the requests

    def read_allotted(self, numbers: Collection[int], lasting: float) -> None:
        """Learn, beside the loop, which nodes Slurm has allotted to requests older than that."""
        now = time.monotonic()
        waiting = [r for n, r in self._requests.items() if n in numbers and now - r.since > lasting]
        if waiting and (self._looking is None or self._looking.done()):
            self._looking = start_task(self._tasks, self._read_allotted(waiting))

    async def learn_allotted(self, numbers: Collection[int]) -> None:
        """Learn at once which nodes Slurm has allotted to these requests."""
        await self._read_allotted([r for n, r in self._requests.items() if n in numbers])

    async def _read_allotted(self, requests: Sequence[StandbyRequest]) -> None:
        try:
            jobs = await run_in_thread(self._allotted, ASK)
        except (SlurmError, TimeoutError):
            for request in requests:
                request.outages = -1  # whatever ends now, Slurm may be the cause
            return
        for request in requests:
            request.update(jobs, time.monotonic())

    def _allotted(self) -> list[Allotted]:
        return self._door.allotted(steps.standby_job_name(self._state.job_id))

    async def held_up(self, over: Callable[[], bool]) -> str:
        """Return why Slurm grants no node (waiting on a limit is in vain); "" if Slurm was away."""
        return await held_up(
            self._slurm, self._door, steps.standby_job_name(self._state.job_id), over
        )

    def assign(self, tasks: Mapping[int, int]) -> dict[int, int]:
        """Map requests to places: the largest places first, each gets the smallest that fits."""
        chosen = {}
        for place in sorted(tasks, key=lambda place: -tasks[place]):
            fitting = [r for r in self._unused() if r.tasks >= tasks[place]]
            best = min(fitting, key=lambda r: (r.tasks, not r.lease, r.number), default=None)
            if best is not None:
                best.used = True
                chosen[best.number] = place
                self.on_used(best)
        return chosen

    def use(self, number: int) -> None:
        """Note that the node of a request has a place."""
        if (request := self._requests.get(number)) is not None and not request.used:
            request.used = True
            self.on_used(request)

    async def lease(self, tasks: int, argv: list[str]) -> None:
        """Ask for a node ahead of need. Raises OSError."""
        await self._start(StandbyRequest(next(self._numbers), tasks, argv, [], lease=True))

    def leases(self) -> list[tuple[StandbyRequest, Node | None]]:
        """Return the leases that are left, those with ranks too, each with its node if it came."""
        self._sweep()
        nodes = {n.standby_request: n for n in self._nodes.values() if not n.gone}
        return [(r, nodes.get(number)) for number, r in self._requests.items() if r.lease]

    # -- leaving

    def drop(self, number: int) -> None:
        self._awaited.discard(number)
        for node in self._nodes.values():
            if node.standby_request == number and node.role is Role.SPARE:
                self._state.members.move(node, Role.RELEASED)
                self._state.bus.send(node, Finish(tuple((0, 0) for _ in range(node.slots))))
        self.end(number)

    def end(self, number: int) -> None:
        """Forget the request of a node that has left the job, and end its srun."""
        request = self._requests.pop(number, None)
        if request is None:
            return
        nodes = [n for n in self._nodes.values() if n.standby_request == number]
        if not nodes or any(n.connection is not None for n in nodes):
            # robust-task tidies its node before Slurm kills it: it was told to finish, or will be
            # as soon as it reports, if it is just being started.
            self._leaving.append(request)
            asyncio.get_running_loop().call_later(END, request.terminate)
        else:
            request.terminate()

    async def close(self) -> None:
        """End all requests and allocations; they were told to finish, or the job is over."""
        if self.asking is not None:
            await asyncio.wait([self.asking], timeout=END)
        starting = [*self._tasks, *([self.asking] if self.asking is not None else [])]
        for task in starting:  # none may start any more
            task.cancel()
        if starting:
            await asyncio.wait(starting, timeout=END)
        requests = [*self._requests.values(), *self._leaving]
        processes = [request.process for request in requests if request.process is not None]
        joined = {n.standby_request for n in self._nodes.values()}
        self.send_away()
        for request in requests:
            request.let_go()
            if request.number not in joined:  # the end of the job does not wait for it
                request.terminate()
        if processes:
            ends = [asyncio.create_task(process.wait()) for process in processes]
            await asyncio.wait(ends, timeout=END)
            for request in requests:
                request.terminate()
            await asyncio.wait(ends, timeout=END)
