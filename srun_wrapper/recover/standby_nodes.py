"""Nodes of the standby partition: asked for as soon as one may be needed, kept or sent away.

A standby allocation belongs to an srun of ours (decision 2). It is requested when a node is in
doubt; if that turns out wrong, it is given back unused. A pending request is used before another
is made, so one fault never costs two nodes. A standby node that does not run robust-task is
excluded, and the next one requested (decision 24).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from robust_slurm.slurm import Allotted, Job, Partition, Slurm, SlurmError
from robust_slurm.slurm.run import without_slurm
from srun_wrapper.command import steps
from srun_wrapper.decide.exclusions import Bad, exclusions
from srun_wrapper.protocol.messages import Finish
from srun_wrapper.recover.slurm_wait import LONGEST, SlurmWait
from srun_wrapper.recover.standby_request import Outcome, Request, outcome
from srun_wrapper.supervisor.aside import aside
from srun_wrapper.supervisor.journal import Journal
from srun_wrapper.supervisor.model import Node, Role
from srun_wrapper.supervisor.report import say
from srun_wrapper.supervisor.state import JobState


def companion_minutes(job: Job, partition: Partition, now: float) -> int:
    """Time limit of a companion: what is left of the job's, at most the partition's."""
    left = job.end_time - now if job.end_time else 365 * 86400.0
    most = partition.max_time_s if partition.max_time_s else left
    return max(1, math.ceil(min(left, most) / 60))


AT_ONCE = 2  # s within which Slurm must give the node that suits best
AGAIN = 5.0  # s until Slurm is asked again for what it did not give
ASK = 3.0  # s for Slurm to say why it gives none, or which node it has given
LOOK = 1.0  # s between looks at what became of the requests
MOST_UNFIT = 3  # requests in a row that brought no node: the next one would not either
BUSY = {"None", "Resources", "Priority"}  # Slurm's reasons that only say that nothing is free
END = 3.0  # s for what is ended to end, before and after it is told

T = TypeVar("T")
Wanted = tuple[int, str]
"""Number of ranks, and the lost node that they were on."""


class Requester(NamedTuple):
    """What a request for a standby node is made of, and with."""

    launch: steps.Launch
    secrets: steps.Secrets
    slurm: Slurm
    prefer: Callable[[Sequence[str], Sequence[str]], Mapping[str, str]]
    """Lost nodes, idle nodes -> the idle node that suits best in place of each."""


class StandbyNodes:
    """Requests standby nodes, and releases those that are not needed."""

    def __init__(
        self,
        state: JobState,
        requester: Requester,
        slurm: SlurmWait,
        journal: Journal,
        bad: list[str],
        earlier: Sequence[Bad] = (),
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """``bad``: nodes that must not come (the list grows).

        ``earlier``: evidence of the job's last steps; such a node comes where there is no other.
        ``over``: True if another failure came, or the step is being ended.
        """
        self._state = state
        self._config = state.config
        self._requester = requester
        self._slurm = slurm
        self._journal = journal
        self._over = over
        self._bad = bad
        self._earlier = tuple(earlier)
        self._numbers = itertools.count(1)
        self._companions: dict[int, Request] = {}
        self._asking: asyncio.Task[str] | None = None
        self._next_ask = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._unfit: dict[str, tuple[int, str]] = {}  # standby node: allocation, what was seen
        self._unreported: set[str] = set()
        self._leaving: list[Request] = []  # their nodes were told to finish
        self._told: set[str] = set()  # slips of ours

    # -- suspicion

    def expect(self, wanted: list[Wanted], suspects: list[str]) -> None:
        """These may have to be replaced; []: none any more. ``suspects`` must not come.

        Called again and again; returns at once.
        """
        if self._asking is not None and not self._asking.done():
            return
        self._sweep()
        now = time.monotonic()
        if len(self._unused()) < len(wanted):
            if now < self._next_ask:
                return
            self._next_ask = now + AGAIN
            self._journal.event("companions_asked", suspects=suspects)
            self._asking = asyncio.create_task(self._ask_for(wanted, suspects))
        elif not wanted:
            self.send_away()

    def send_away(self) -> None:
        """Those that were asked for and are not needed."""
        for companion in self._unused():
            self._journal.event("companion_sent_away", number=companion.number)
            self._drop(companion.number)

    def _unused(self) -> list[Request]:
        return [c for c in self._companions.values() if not c.used]

    def _sweep(self) -> None:
        """Forget those that went before they were needed."""
        lost = {n.companion for n in self._state.nodes.values() if n.gone}
        for request in self._unused():
            if request.number in lost or (request.ended and request.outcome != "waiting"):
                if request.outcome == "unfit":
                    self._note_unfit(request, "srun ended before robust-task reported")
                self._drop(request.number)

    # -- need

    async def take(
        self,
        places: Mapping[int, Wanted],
        vacant: Callable[[int], bool] = lambda _place: True,
        enough: Callable[[], bool] = lambda: False,
    ) -> dict[int, Node]:
        """Nodes for places, as many as come in time, while the places are ``vacant``.

        ``enough``: another way has been found.
        """
        state, began = self._state, time.monotonic()
        chosen: dict[int, int] = {}  # number of a request → its place
        lacking, tries, deadline, why = set(places), 0, math.inf, ""
        reasons: asyncio.Task[str] | None = None

        def came() -> dict[int, Node]:
            nodes = [n for n in state.nodes.values() if n.role is Role.SPARE and n.connection]
            found = {chosen[n.companion]: n for n in nodes if n.companion in chosen}
            return {place: node for place, node in found.items() if vacant(place)}

        def over() -> bool:
            return self._over() or enough()

        def complete() -> bool:
            return len(came()) == sum(map(vacant, places))

        def settled() -> bool:
            return complete() or over()

        def news() -> bool:
            requests = [self._companions.get(number) for number in chosen]
            changed = any(r is None or r.outcome != "waiting" for r in requests)
            return changed or settled()

        if (asking := self._asking) is not None:
            asking.add_done_callback(lambda _done: state.changed.set())
            await state.until(lambda: asking.done() or settled(), None)
        while not settled():
            if lacking:
                why = await self._ask_for([places[p] for p in lacking], [], settled)
                if why:
                    break
                chosen |= self._assign({place: places[place][0] for place in lacking})
                deadline = time.monotonic() + self._config.standby_wait
            left = deadline - time.monotonic()
            if left <= ASK and reasons is None:
                reasons = asyncio.create_task(self._held_up(settled))  # it costs no second more
            if left <= 0:
                assert reasons is not None
                if not (why := await reasons):  # Slurm was away: it could give none
                    deadline, reasons = time.monotonic() + self._config.standby_wait, None
                    continue
                break
            self._look(chosen)
            await state.until(news, min(LOOK, left))
            if self._refused(chosen):
                why = "srun says why, above"
                break
            lacking = set(filter(vacant, self._review(chosen, came())))
            tries += bool(lacking)
            if tries > MOST_UNFIT:
                break
        if reasons is not None:
            reasons.cancel()
        ready = came()
        short = not settled()
        self._dismiss(chosen, ready)
        if short:
            self._complain(len(ready), len(places), why, time.monotonic() - began)
        return ready

    def _refused(self, chosen: Mapping[int, int]) -> bool:
        """True if Slurm grants no node, or srun could not be run: the request is then dropped."""
        joined = {n.companion for n in self._state.nodes.values()}
        requests = [self._companions.get(number) for number in chosen if number not in joined]
        return any(r is None or r.outcome == "refused" for r in requests)

    def _review(self, chosen: dict[int, int], ready: Mapping[int, Node]) -> set[int]:
        """Places that need another request: the node of theirs did not come, or is silent."""
        now, lacking = time.monotonic(), set[int]()
        limit = self._config.standby_start_limit
        joined = {n.companion: n for n in self._state.nodes.values() if n.companion}
        for number, place in list(chosen.items()):
            request, node = self._companions.get(number), joined.get(number)
            if place in ready:
                continue
            if node is not None and node.gone:
                self._unfit[node.name] = (node.job_id, "it was lost before it had ranks")
            elif request is None or request.outcome == "refused":
                continue
            elif request.outcome == "unfit":
                self._note_unfit(request, "srun ended before robust-task reported")
            elif request.outcome == "waiting" and node is None and request.silent(now, limit):
                alone = sum(place == other for other in chosen.values()) == 1
                if alone:  # it stays: which of two is first?
                    lacking.add(place)
                    self._note_silent(request, now)
                continue
            elif request.outcome != "again":
                continue
            del chosen[number]
            self._drop(number)
            lacking.add(place)
        return lacking - set(ready)

    def _note_unfit(self, request: Request, what: str) -> None:
        code = request.process.returncode if request.process is not None else None
        self._unfit[request.node] = (request.job, f"{what} (exit code {code})")
        self._unreported.add(request.node)

    def _note_silent(self, request: Request, now: float) -> None:
        seconds = now - (request.runs_since or now)
        what = f"no word of robust-task {seconds:.0f} s after Slurm had started it "
        what += "(if it is only slow, raise standby_start_limit)"
        self._unfit[request.node] = (request.job, what)

    def _dismiss(self, chosen: Mapping[int, int], ready: Mapping[int, Node]) -> None:
        """Send away the requests that brought no node; a new failure may still need them."""
        state, now, limit = self._state, time.monotonic(), self._config.standby_start_limit
        for number, place in chosen.items():
            node, request = ready.get(place), self._companions.get(number)
            if node is not None and node.companion == number:
                self._unfit.pop(node.name, None)  # it was only slow
                continue
            if node is not None and request is not None and request.silent(now, limit):
                other = self._companions.get(node.companion)
                if other is not None and now - other.since < limit:  # nothing delays both
                    self._unreported.add(request.node)
            if node is None and request is not None and state.failures and not state.signalled:
                request.used = False  # it keeps its turn
            else:
                self._drop(number)  # it may still come: then it is sent away

    def _complain(self, came: int, wanted: int, why: str, seconds: float) -> None:
        if why in self._told:
            return
        unfit = [f"{name}: {what}" for name, (_, what) in self._unfit.items()]
        reasons = "; ".join(filter(None, [*unfit, why])) or "no request reached a node"
        say(
            f"partition {self._config.standby_partition} gave {came} of {wanted} nodes "
            f"in {seconds:.1f} s ({reasons})"
        )

    def to_report(self, came: bool) -> dict[str, tuple[int, str]]:
        """Standby nodes that did not run robust-task: allocation, and what was seen; once each.

        Empty where several failed and none did not: that is a cause that they share.
        """
        names, self._unreported = self._unreported, set()
        if not came and len(names) > 1:
            where = ", ".join(sorted(names))
            say(f"robust-task did not run on {where}: is its python there (task_python)?")
            return {}
        return {name: self._unfit[name] for name in names}

    # -- what became of the requests

    def _look(self, chosen: Mapping[int, int]) -> None:
        """Learn, beside the loop, which nodes Slurm has allotted to requests that take long."""
        now = time.monotonic()
        waiting = [r for n, r in self._companions.items() if n in chosen and now - r.since > LOOK]
        if waiting and (self._looking is None or self._looking.done()):
            self._looking = self._beside(self._look_once(waiting))

    async def _look_once(self, requests: Sequence[Request]) -> None:
        try:
            jobs = await aside(self._allotted, ASK)
        except (SlurmError, TimeoutError):
            for request in requests:
                request.outages = -1  # whatever ends now, Slurm may be the cause
            return
        for request in requests:
            request.look(jobs, time.monotonic())

    def _allotted(self) -> list[Allotted]:
        return self._requester.slurm.allotted(steps.companion_name(self._state.job_id))

    async def _held_up(self, over: Callable[[], bool]) -> str:
        """Return why Slurm grants no node (waiting on a limit is in vain); "" if Slurm was away."""
        before = self._slurm.outage.count
        name = steps.companion_name(self._state.job_id)
        try:
            reasons = await self._slurm.call(
                "get a standby node", lambda: self._requester.slurm.waiting_reasons(name), over
            )
        except SlurmError:
            return "Slurm does not say why"
        if self._slurm.outage.count != before:
            return ""
        told = ", ".join(sorted(reasons - BUSY))
        return f"Slurm's reason: {told}" if told else "none became free"

    def _assign(self, tasks: Mapping[int, int]) -> dict[int, int]:
        """Number → place; the largest places first, each gets the smallest that is enough."""
        chosen = {}
        for place in sorted(tasks, key=lambda place: -tasks[place]):
            fitting = [c for c in self._unused() if c.tasks >= tasks[place]]
            best = min(fitting, key=lambda c: (c.tasks, c.number), default=None)
            if best is not None:
                best.used = True
                chosen[best.number] = place
        return chosen

    # -- asking

    async def _ask_for(
        self, wanted: list[Wanted], suspects: list[str], over: Callable[[], bool] | None = None
    ) -> str:
        """Have one for each that none of the unused fits; why that is not possible, or "".

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
        spare = sorted(c.tasks for c in self._unused())
        missing = []
        for tasks, name in sorted(wanted, reverse=True):
            fitting = next((have for have in spare if have >= tasks), None)
            if fitting is None:
                missing.append((tasks, name))
            else:
                spare.remove(fitting)
        if not missing:
            return ""
        without = list(dict.fromkeys([*self._bad, *suspects, *self._unfit]))
        partition, slurm = self._config.standby_partition, self._requester.slurm
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
        minutes = companion_minutes(job, partitions[partition], time.time())
        free = [n.name for n in nodes.values() if n.idle and partition in n.partitions]
        free = [name for name in free if name not in without]
        kept, _ = exclusions(self._earlier, set(free), len(missing))
        without = list(dict.fromkeys([*without, *kept]))
        idle = [name for name in free if name not in without]
        best = self._requester.prefer([name for _, name in missing], idle)
        launch = self._requester.launch
        try:
            for tasks, name in missing:
                argv = steps.companion_argv(launch, job, partition, tasks, without, minutes)
                now = f"--immediate={AT_ONCE}"
                prefer = [f"--nodelist={best[name]}", now] if name in best else []
                await self._start(Request(next(self._numbers), tasks, argv, prefer))
        except OSError as err:
            return f"cannot run srun for a standby node: {err}"
        return ""

    async def _question(self, ask: Callable[[], T], over: Callable[[], bool] | None) -> T:
        if over is None:
            return await aside(ask, LONGEST)
        return await self._slurm.call("get a standby node", ask, over)

    async def _start(self, request: Request) -> None:
        launch, number = self._requester.launch, request.number
        task = steps.task_argv(self._config.task_python, launch.options, launch.command.command)
        env = {**without_slurm(launch.env), **self._requester.secrets.env(number)}
        self._state.awaited.add(number)
        self._companions[number] = request
        request.process, request.since = None, time.monotonic()
        request.outages = self._slurm.outage.count
        argv = [request.argv[0], *request.prefer, *request.argv[1:], *task]
        try:
            # Nobody's input but the job's own srun's.
            request.process = process = await steps.start(
                argv, env, own_session=True, stdin=asyncio.subprocess.DEVNULL
            )
        finally:
            if request.process is None:
                self._drop(number)
        if number not in self._companions:  # not wanted any more, meanwhile
            request.terminate()
        self._beside(self._notice_end(request, process))

    async def _notice_end(self, request: Request, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        joined = any(n.companion == request.number for n in self._state.nodes.values())
        if not joined and request.number in self._companions:
            found = await self._judge(request)
            preferred, request.prefer = request.prefer, []
            if preferred and found != "unfit" and request.number in self._companions:
                try:
                    await self._start(request)  # Somebody was quicker: any node will do.
                except OSError as err:
                    say(f"cannot run srun for a standby node: {err}")
            else:
                request.outcome = found
        request.prefer = [] if joined else request.prefer
        self._state.changed.set()

    async def _judge(self, request: Request) -> Outcome:
        """Learn what became of a request whose srun has ended before robust-task reported."""
        lasted = time.monotonic() - request.since
        try:
            jobs = await self._slurm.call("learn which standby node was allotted", self._allotted)
        except SlurmError:
            return "refused"
        away = self._slurm.outage.count != request.outages
        code = request.process.returncode if request.process is not None else None
        return outcome(request.look(jobs, time.monotonic()), code or 0, lasted, away)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- leaving

    def _drop(self, number: int) -> None:
        self._state.awaited.discard(number)
        for node in self._state.nodes.values():
            if node.companion == number and node.role is Role.SPARE:
                self._state.members.move(node, Role.RELEASED)
                if node.connection is not None:
                    node.connection.send(Finish(tuple((0, 0) for _ in range(node.slots))))
        self.end(number)

    def end(self, number: int) -> None:
        """Its node has left the job."""
        request = self._companions.pop(number, None)
        if request is None:
            return
        nodes = self._state.nodes.values()
        if any(n.companion == number and n.connection is not None for n in nodes):
            # robust-task was told to finish: it tidies its node before Slurm kills it.
            self._leaving.append(request)
            asyncio.get_running_loop().call_later(END, request.terminate)
        else:
            request.terminate()

    async def close(self) -> None:
        """End all requests and allocations; they were told to finish, or the job is over."""
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=END)
        starting = [*self._tasks, *([self._asking] if self._asking is not None else [])]
        for task in starting:  # none may start any more
            task.cancel()
        if starting:
            await asyncio.wait(starting, timeout=END)
        requests = [*self._companions.values(), *self._leaving]
        processes = [request.process for request in requests if request.process is not None]
        self.send_away()
        if processes:
            ends = [asyncio.create_task(process.wait()) for process in processes]
            await asyncio.wait(ends, timeout=END)
            for request in requests:
                request.terminate()
            await asyncio.wait(ends, timeout=END)
