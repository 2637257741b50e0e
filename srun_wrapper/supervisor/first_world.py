"""The job's first world: waits for the nodes of the step, and gives the places to them."""

from __future__ import annotations

import asyncio
import time

from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.values import expand, fold
from robust_slurm.text import counted
from srun_wrapper.command.steps import Launch
from srun_wrapper.command.torchrun import restarts_itself
from srun_wrapper.decide import ladder
from srun_wrapper.job.model import Node, Role, first_places
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.protocol.messages import Hello
from srun_wrapper.protocol.server import probe
from srun_wrapper.recover.replace import Replacement
from srun_wrapper.run_in_thread import run_in_thread
from srun_wrapper.supervisor.life import Finishing
from srun_wrapper.supervisor.step import asking
from srun_wrapper.supervisor.step.attempts import SIGNALS, Attempts, shares

BAD_SIZE = 2  # exit code, as for other bad input
SOON = 10.0  # s after the first node for the others to report before Slurm is asked about them
DOUBT = 5.0  # s until a node that was named once is asked again
LOOK = "look at slurmd's log on the nodes missing from:"
LATER = 60.0  # s between two looks at nodes, in the end
REACH = 3.0  # s for the kernel of a node that Slurm lists as not responding
SILENT = frozenset({"NOT_RESPONDING", "DOWN"})
SLURMD = 6818  # Slurm's default for the port of slurmd
SLURM = 10.0  # s for Slurm to list the steps of the job


class FirstWorld:
    """Waits for the nodes and gives the places to them."""

    def __init__(
        self,
        state: JobState,
        launch: Launch,
        finishing: Finishing,
        topology: Topology,
        replacement: Replacement,
        attempts: Attempts,
        slurm: Slurm,
    ) -> None:
        self._state = state
        self._config = state.config
        self._launch = launch
        self._plan = launch.plan
        self._finishing = finishing
        self._step = finishing.step
        self._topology = topology
        self._replacement = replacement
        self._attempts = attempts
        self._slurm = slurm
        self._lost: dict[Node, str] = {}  # members that never came, and why

    async def wait_for_shims(self) -> int | None:
        """Wait until every node of the step has reported, or is lost; an exit code if it ends.

        Not when the step is to end: some may have died of the signal before they could report. A
        node that is only slow is waited for, as srun waits.
        """
        state, limit = self._state, self._config.task_start_limit
        self._attempts.again = False
        if not await self._first_came():
            return self._step.code or 1
        began, pause, said = time.monotonic(), SOON, False
        while not self._complete():
            left = limit - (time.monotonic() - began)
            if await state.until(self._complete, min(pause, left) if left > 0 else pause):
                break
            late = time.monotonic() - began >= limit
            if self._launch.observed is None:
                await self._find_lost(ended=late)
            if late and not self._complete():
                if self._enough():
                    say(
                        f"{self._missing()}: going on without, {self._needed()} are needed; {LOOK} "
                        f"{self._came()}"
                    )
                    break
                if not said:
                    say(
                        f"{self._missing()}, {self._needed()} are needed: waiting, as srun does; "
                        f"if it takes too long, {LOOK} {self._came()}"
                    )
                said = True
            pause = DOUBT if self._attempts.in_doubt else min(2 * pause, LATER)
        if self._step.ended:
            return await self._not_started()
        return None

    async def _first_came(self) -> bool:
        """Wait for a node to report, or for srun to end; False if srun is to be started again.

        srun waits in silence for a node that does not respond, until Slurm sets it DOWN.
        """
        state, began, pause = self._state, time.monotonic(), SOON
        while not await state.until(lambda: bool(state.nodes) or self._step.ended, pause):
            late = time.monotonic() - began >= self._config.task_start_limit
            lost = {} if self._launch.observed else await self._silent(late=late)
            if lost and not state.nodes and not self._over():
                say(f"srun has not started the step: {self._attempts.without(lost)}")
                await self._step.end(patience=0.0)
                return False
            pause = DOUBT if self._attempts.in_doubt else min(2 * pause, LATER)
        return True

    async def _silent(self, *, late: bool) -> dict[str, str]:
        """Return the evidence against nodes that answer neither Slurm nor us, twice.

        ``late``: a kernel that answers, but has no slurmd, counts as well.
        """
        try:
            job = await run_in_thread(lambda: self._slurm.job(self._state.job_id), SLURM)
            nodes = await run_in_thread(lambda: self._slurm.nodes(job.nodes), SLURM)
        except (SlurmError, TimeoutError):
            return {}
        silent = [node for node in nodes.values() if node.state & SILENT]
        hosts = [(node.raw.get("NodeAddr", node.hostname), node.port or SLURMD) for node in silent]
        answers = await asyncio.gather(*(probe(*host, REACH, (0.5, 1.0)) for host in hosts))
        text = "Slurm lists it as not responding, and "
        wrong = {"unreachable": text + "its kernel does not answer"}
        if late:
            wrong["refused"] = text + "nothing listens on its slurmd's port"
        found = {n.name: wrong[a] for n, a in zip(silent, answers, strict=True) if a in wrong}
        return self._attempts.twice(found)

    async def _removed(self) -> dict[str, str]:
        """Return the nodes that Slurm itself has taken from the job."""
        try:
            job = await run_in_thread(lambda: self._slurm.job(self._state.job_id), SLURM)
            had = expand(self._launch.env.get("SLURM_JOB_NODELIST", ""))
        except (SlurmError, TimeoutError, ValueError):
            return {}
        left = set(job.nodes)
        return {
            name: "Slurm has taken it from the job" for name in had if left and name not in left
        }

    def _over(self) -> bool:
        return self._step.ended or self._state.signalled > 0

    def _complete(self) -> bool:
        return self._over() or len(self._state.nodes) + len(self._lost) >= self._wanted()

    def _wanted(self) -> int:
        return next((node.hello.step_nodes for node in self._state.nodes.values()), 1)

    def _needed(self) -> int:
        planned = self._plan.active_nodes
        return self._wanted() if planned is None else planned - self._plan.short

    def _enough(self) -> bool:
        return len(self._state.nodes) >= self._needed()

    def _came(self) -> str:
        return fold(node.name for node in self._state.nodes.values())

    def _missing(self) -> str:
        """Describe the nodes that have not reported."""
        wanted = self._wanted()
        count = wanted - len(self._state.nodes) - len(self._lost)
        limit = self._config.task_start_limit
        return f"{count} of {wanted} nodes did not start robust-task within {limit:g} s"

    async def _find_lost(self, *, ended: bool) -> None:
        """Ask Slurm about the nodes that have not reported; ``ended``: see ``Attempts.missing``."""
        state = self._state
        try:
            steps = await run_in_thread(lambda: self._slurm.steps(state.job_id), SLURM)
        except (SlurmError, TimeoutError):
            return
        own = next((s for s in steps if s.id == f"{state.job_id}.{state.step_id}"), None)
        if own is None or self._complete():
            return
        known = {node.key[2]: node.hello.tasks for node in state.nodes.values()}
        lost = {node.key[2] for node in self._lost}
        names = {i: name for i, name in enumerate(own.nodes) if i not in known and i not in lost}
        argv = asking.ask_for_step(list(names.values()), state.job_id, state.step_id)
        answer = await asking.ask(argv, self._launch.env)
        if answer is None or self._over():
            return
        sure = self._attempts.missing(answer, ended=ended)
        first = next(iter(state.nodes.values())).hello
        taken = {task for tasks in known.values() for task in tasks}
        free = [task for task in range(first.step_tasks) if task not in taken]
        dealt = shares([i for i in range(len(own.nodes)) if i not in known], free, known)
        for index, name in names.items():
            came = any(node.key[2] == index for node in state.nodes.values())
            if name in sure and not came:
                say(f"{name}: {sure[name]}")
                self._lost[self._absent(name, state.step_id, index, dealt[index])] = sure[name]

    def _absent(self, name: str, step: str, index: int, tasks: tuple[int, ...]) -> Node:
        """Return a member for a node that never reported."""
        job = self._state.job_id
        hello = Hello(job, step, index, name, tasks, self._wanted(), 0, 0, 0, 0, 0)
        now = time.monotonic()
        return Node((job, step, index), name, name, hello, None, Role.SPARE, now, 0)

    def _join_lost(self) -> None:
        """Give the nodes that do not start a task their places, to be replaced like any other."""
        slots, active, lost = (
            self._plan.slots_per_node,
            self._plan.active_nodes,
            self._attempts.lost,
        )
        if slots is not None and active is not None:
            last = active - len(lost) - 1  # they get the last places, before any spare
            for name, why in lost.items():
                absent = self._absent(name, f"not on {name}", last, tuple(range(slots)))
                self._lost[absent] = why
        for node in self._lost:
            self._state.members.join(node)

    async def _not_started(self) -> int:
        """Decide whether srun, which has ended, is started again; return its exit code."""
        state, code = self._state, self._step.code or 1
        why = ""
        if code not in SIGNALS and not state.signalled and self._launch.observed is None:
            answer = await asking.ask(asking.ask_all(self._launch), self._launch.env)
            nodes = int(self._launch.env.get("SLURM_JOB_NUM_NODES") or 1)
            why = self._attempts.failed(answer, nodes, code)
            if not why and (removed := await self._removed()):
                why = self._attempts.without(removed)
            if state.signalled:
                why, self._attempts.again = "", False
        if not why:
            say(f"srun could not start the step (exit code {code}); its message is above")
            return code
        say(f"srun could not start the step (exit code {code}): {why}")
        if await state.until(lambda: state.signalled > 0, self._attempts.pause):
            self._attempts.again = False
        return code

    async def form(self) -> int | None:
        """Give the places to nodes; an exit code if there are too few."""
        state = self._state
        self._join_lost()
        if (short := self._plan.short - len(self._attempts.lost)) > 0:
            came = await self._replacement.reinforce(short, self._plan.slots_per_node or 1)
            if state.signalled:
                return None
            if self._step.ended:
                return await self._finishing.step_ended()
            if len(came) < short:
                say(f"{short} of the nodes released by an earlier step could not be replaced")
                return ladder.NOTHING_LEFT
            names = ", ".join(node.name for node in came)
            say(f"{names} replaced nodes released in an earlier step of this job")
        nodes, planned = list(state.nodes.values()), self._plan.ranks_per_active_node
        try:
            places, ranks = first_places(nodes, planned)
        except LookupError as err:
            say(str(err.args[0]))
            return ladder.NOTHING_LEFT
        except ValueError as err:
            say(str(err))
            return BAD_SIZE
        state.members.lay_out(places, ranks)
        await self._topology.arrange_first()
        for node in state.world.places:
            state.members.move(node, Role.ACTIVE)
        for node, why in self._lost.items():
            state.lose(node, why)
        asked = restarts_itself(self._launch.command.command, self._launch.env)
        ours = self._config.rank_env and self._config.mode != "observe"
        if asked and ours and all(len(numbers) == 1 for numbers in ranks):
            say(f"torchrun's --max-restarts={asked} is set to 0: robust-srun restarts its ranks")
        if self._config.verbose or state.spares():
            spare = ", ".join(n.name for n in state.spares()) or "none"
            size = f"{counted(len(places), 'node')}, {counted(state.world.size, 'rank')}"
            say(f"{size}, spares: {spare}")
        return None
