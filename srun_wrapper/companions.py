"""Nodes of the standby partition: asked for as soon as one may be needed, kept or sent away.

A companion is an srun of ours with an allocation of its own (decision 2). It is asked for when a
node is in doubt; if that turns out wrong it is given back, unused. One that has been
asked for is used before another is: a fault never costs two.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from robust_slurm.slurm import Job, Partition, SlurmError
from robust_slurm.slurm.run import without_slurm
from srun_wrapper import steps
from srun_wrapper.aside import aside
from srun_wrapper.messages import Finish
from srun_wrapper.report import say
from srun_wrapper.roster import Node, Role

if TYPE_CHECKING:
    from srun_wrapper.supervisor import Supervisor


def companion_minutes(job: Job, partition: Partition, now: float) -> int:
    """Time limit of a companion: what is left of the job's, at most the partition's."""
    left = job.end_time - now if job.end_time else 365 * 86400.0
    most = partition.max_time_s if partition.max_time_s else left
    return max(1, math.ceil(min(left, most) / 60))


AT_ONCE = 2  # s within which Slurm must give the node that suits best
AGAIN = 5.0  # s until Slurm is asked again for what it did not give
ASK = 3.0  # s for Slurm to say why it gives none
BUSY = {"None", "Resources", "Priority"}  # Slurm's reasons that only say that nothing is free
END = 3.0  # s for what is ended to end, before and after it is told

Wanted = tuple[int, str]
"""Number of ranks, and the lost node that they were on."""


@dataclass(slots=True)
class _Companion:
    number: int
    tasks: int
    argv: list[str]
    prefer: list[str]
    """srun's options that ask for one particular node, at once or not at all."""
    process: asyncio.subprocess.Process | None = None
    used: bool = False

    @property
    def ended(self) -> bool:
        """Its srun has, and none follows."""
        return self.process is not None and self.process.returncode is not None and not self.prefer


class Companions:
    """``bad``: nodes that must not come (the list grows); ``earlier``: of the job's last steps."""

    def __init__(
        self,
        supervisor: Supervisor,
        secrets: steps.Secrets,
        bad: list[str],
        earlier: Sequence[str] = (),
    ) -> None:
        self._boss = supervisor
        self._state = supervisor.state
        self._config = supervisor.config
        self._secrets = secrets
        self._bad = bad
        self._earlier = tuple(earlier)
        self._numbers = itertools.count(1)
        self._companions: dict[int, _Companion] = {}
        self._asking: asyncio.Task[str] | None = None
        self._next_ask = 0.0
        self._waits: set[asyncio.Task[None]] = set()
        self._reason = ""  # why none came, for the user
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
            self._boss.ledger.event("companions_asked", suspects=suspects)
            self._asking = asyncio.create_task(self._ask_for(wanted, [*self._bad, *suspects]))
        elif not wanted:
            self.send_away()

    def send_away(self) -> None:
        """Those that were asked for and are not needed."""
        for companion in self._unused():
            self._boss.ledger.event("companion_sent_away", number=companion.number)
            self._drop(companion.number)

    def _unused(self) -> list[_Companion]:
        return [c for c in self._companions.values() if not c.used]

    def _over(self) -> set[int]:
        """Numbers of those whose srun or node is gone."""
        ended = {c.number for c in self._companions.values() if c.ended}
        return ended | {n.companion for n in self._state.nodes.values() if n.gone}

    def _sweep(self) -> None:
        """Forget those that went before they were needed."""
        for number in self._over() & {c.number for c in self._unused()}:
            self._drop(number)

    # -- need

    async def take(self, places: Mapping[int, Wanted]) -> dict[int, Node]:
        """Nodes for places, as many as come in time."""
        state = self._state
        if self._asking is not None:
            await self._asking
        why = await self._ask_for(list(places.values()), self._bad)
        if why:
            if why not in self._told:
                say(why)
            return {}
        chosen = self._assign({place: tasks for place, (tasks, _) in places.items()})

        def came() -> dict[int, Node]:
            return {
                chosen[n.companion]: n
                for n in state.nodes.values()
                if n.companion in chosen and n.role is Role.SPARE and n.connection
            }

        def refused() -> bool:
            over = self._over()
            return any(n in over or n not in self._companions for n in chosen)

        def other() -> bool:
            return bool(state.failures) or state.signalled > 0 or self._boss.step.ended

        def over() -> bool:
            return len(came()) == len(chosen) or refused() or other()

        before = max(0.0, self._config.standby_wait - ASK)
        if not await state.until(over, before):
            asking = asyncio.create_task(self._held_up())  # it costs no second more
            await state.until(over, self._config.standby_wait - before)
            asking.cancel()
        ready = came()
        gave_up = refused()
        for number in [number for number, place in chosen.items() if place not in ready]:
            if state.failures and not state.signalled and number in self._companions:
                self._companions[number].used = False  # the next recovery's: it keeps its turn
            else:
                self._drop(number)  # it may still come: then it is sent away
        if len(ready) < len(places) and not other():
            say(
                f"partition {self._config.standby_partition} gave {len(ready)} of {len(places)} "
                f"nodes within {self._config.standby_wait:g} s "
                f"({'srun says why, above' if gave_up else self._reason})"
            )
        return ready

    async def _held_up(self) -> None:
        """Learn why Slurm gives none: a limit is waited for in vain."""
        name = steps.companion_name(self._state.job_id)
        self._reason = "Slurm does not say why"
        with contextlib.suppress(SlurmError, TimeoutError):
            reasons = await aside(lambda: self._boss.slurm.waiting_reasons(name), ASK)
            told = ", ".join(sorted(reasons - BUSY))
            self._reason = f"Slurm's reason: {told}" if told else "none became free"

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

    async def _ask_for(self, wanted: list[Wanted], without: list[str]) -> str:
        """Have one for each that none of the unused fits; why that is not possible, or ""."""
        try:
            return await self._request(wanted, without)
        except Exception as err:  # noqa: BLE001 - a slip here must not end the job
            text = f"internal error while asking for a node: {type(err).__name__}: {err}"
            if text not in self._told:
                self._told.add(text)
                say(text)
            return text

    async def _request(self, wanted: list[Wanted], without: list[str]) -> str:
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
        without = list(dict.fromkeys([*without, *self._earlier]))
        partition, slurm = self._config.standby_partition, self._boss.slurm
        try:
            job, partitions, nodes = await asyncio.gather(
                asyncio.to_thread(slurm.job, self._state.job_id),
                asyncio.to_thread(slurm.partitions),
                asyncio.to_thread(slurm.nodes),
            )
        except SlurmError as err:
            return f"cannot ask for a standby node: {err}"
        if partition not in partitions:
            return f"no partition {partition!r} to take a node from (standby_partition)"
        minutes = companion_minutes(job, partitions[partition], time.time())
        idle = [
            n.name
            for n in nodes.values()
            if n.idle and partition in n.partitions and n.name not in without
        ]
        best = self._boss.neighbours.prefer([name for _, name in missing], idle)
        launch = self._boss.launch
        try:
            for tasks, name in missing:
                argv = steps.companion_argv(launch, job, partition, tasks, without, minutes)
                now = f"--immediate={AT_ONCE}"
                prefer = [f"--nodelist={best[name]}", now] if name in best else []
                await self._start(_Companion(next(self._numbers), tasks, argv, prefer))
        except OSError as err:
            return f"cannot run srun for a standby node: {err}"
        return ""

    async def _start(self, companion: _Companion) -> None:
        launch, number = self._boss.launch, companion.number
        task = steps.task_argv(self._config.task_python, launch.options, launch.command.command)
        env = {**without_slurm(self._boss.env), **self._secrets.env(number)}
        self._state.awaited.add(number)
        self._companions[number] = companion
        companion.process = None
        argv = [companion.argv[0], *companion.prefer, *companion.argv[1:], *task]
        try:
            # Nobody's input but the job's own srun's.
            companion.process = process = await steps.start(
                argv, env, own_session=True, stdin=asyncio.subprocess.DEVNULL
            )
        finally:
            if companion.process is None:
                self._drop(number)
        if number not in self._companions:  # not wanted any more, meanwhile
            _terminate(process)
        notice = asyncio.create_task(self._notice_end(companion, process))
        self._waits.add(notice)
        notice.add_done_callback(self._waits.discard)

    async def _notice_end(self, companion: _Companion, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        joined = any(n.companion == companion.number for n in self._state.nodes.values())
        preferred, companion.prefer = companion.prefer, []
        if preferred and not joined and companion.number in self._companions:
            try:
                await self._start(companion)  # Somebody was quicker: any node will do.
            except OSError as err:
                say(f"cannot run srun for a standby node: {err}")
        self._state.changed.set()

    # -- leaving

    def _drop(self, number: int) -> None:
        self._state.awaited.discard(number)
        for node in self._state.nodes.values():
            if node.companion == number and node.role is Role.SPARE:
                self._state.move(node, Role.RELEASED)
                if node.connection is not None:
                    node.connection.send(Finish(tuple((0, 0) for _ in range(node.slots))))
        self.end(number)

    def end(self, number: int) -> None:
        """Its node has left the job."""
        companion = self._companions.pop(number, None)
        if companion is not None and companion.process is not None:
            _terminate(companion.process)

    async def close(self) -> None:
        """End all companions; they were told to finish, or the job is over."""
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=END)
        starting = [*self._waits, *([self._asking] if self._asking is not None else [])]
        for task in starting:  # none may start any more
            task.cancel()
        if starting:
            await asyncio.wait(starting, timeout=END)
        processes = [c.process for c in self._companions.values() if c.process is not None]
        self.send_away()
        if processes:
            ends = [asyncio.create_task(process.wait()) for process in processes]
            await asyncio.wait(ends, timeout=END)
            for process in processes:
                _terminate(process)
            await asyncio.wait(ends, timeout=END)


def _terminate(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
