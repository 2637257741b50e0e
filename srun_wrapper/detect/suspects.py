"""Probe nodes whose report is late; if one does not answer, have other nodes probe it too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from srun_wrapper.command.rank_env import fold_hosts
from srun_wrapper.detect.guard import WatchGuard
from srun_wrapper.detect.unreachable import OverdueNode, SilencePatience, judge, neighbours
from srun_wrapper.detect.witnesses import Witnesses, job_order
from srun_wrapper.job.bus import OpenRequest
from srun_wrapper.job.model import AgentKey, Node
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.peer_messages import Reach, Reached
from srun_wrapper.protocol.server import Answer, probe
from srun_wrapper.start_task import start_task

LATE = 0.1  # share of an interval by which a sign of life may be late before its node is probed
LATE_LEAST = 0.025  # s, at the least
LOOKS = 0.1  # share of an interval between two looks
LOOKS_LEAST = 0.02  # s, at the least
EVERY = 0.025  # s between two attempts to connect
ATTEMPTS = 40  # at the most, until the node may be lost
UNANSWERED = 0.05  # s; a host that lives answers in a tenth of this
DOUBTED = 0.2  # s; by then it is known which other nodes are cut off with it
Found = Literal["lost", "reached", "back", "open"]
LOOK = 0.01  # s between two looks at what is known of a suspect
HELD_UP = 0.1  # s that a look may be late; beyond, robust-srun itself was late and judges no node
SIGN = 0.5  # s for another node to give a sign of life
LEFT = 0.75  # s after the limit in which missing answers may come; then silence alone decides
VOUCHED = 1.0  # s for which a witness's answer counts
AGAIN = 0.5  # s between two questions to witnesses of a node that only they can reach
MANY = 8  # unanswered nodes at which no further one is followed: none of them is lost this way


@dataclass(slots=True)
class _Case:
    """A node whose sign of life is late."""

    node: Node
    word: float  # time of its last message
    asked: float
    unanswered: bool = False  # for ``UNANSWERED`` seconds
    vouched: float = float("-inf")  # when a witness reached it


class Suspects:
    """Watches for late reports; ``lost`` gets a node that is lost, and why."""

    def __init__(self, state: JobState, lost: Callable[[Node, float, str], None]) -> None:
        self._state = state
        self._lost = lost
        self._cases: dict[AgentKey, _Case] = {}
        self._words: dict[AgentKey, float] = {}  # last message of nodes whose case is closed
        self._signs: dict[AgentKey, float] = {}  # when a node's kernel answered
        self._given_up: dict[AgentKey, float] = {}  # last message of nodes that were lost this way
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked = float("inf")
        self.held_up = float("-inf")  # when this process was last late
        self.patience = SilencePatience(state.config.unreachable_limit)
        self.witnesses = Witnesses(state)

    async def run(self, say: Callable[[str], None]) -> None:
        """Look until the job ends; ``say`` gets internal errors."""
        guard = WatchGuard(say)
        while not self._state.ending:
            guard.call(self.look, time.monotonic())
            await asyncio.sleep(self._tick())

    def doubted(self, node: Node, now: float) -> bool:
        """Return whether this node alone does not answer: it may have to be replaced."""
        case = self._cases.get(node.key)
        if case is None or not case.unanswered or now - case.asked < DOUBTED:
            return False
        return not self._unanswered_beside(case)

    def vouched(self, node: Node, now: float) -> bool:
        """Return whether another node has just reached this one."""
        case = self._cases.get(node.key)
        return case is not None and now - case.vouched < VOUCHED

    def stumbled(self, length: float) -> None:
        """A node that was lost has answered again."""
        self.patience.note(length, time.monotonic())

    def look(self, now: float) -> None:
        """Probe every node whose report is late, once; called all the time."""
        if self.patience.off:
            return
        self._notice(now)
        self._learn()
        self.witnesses.look(now)
        soonest = now - (self._state.pulse or self._state.interval)
        for node in self._state.live():
            if node.last_word > soonest or node.key in self._cases:
                continue
            interval = self._interval(node)
            known = max(node.last_word, self.held_up) + interval + late(interval)
            if now < known or node.name == self._state.own_node:
                continue
            if node.second_way and self._words.get(node.key) != node.last_word:
                self._suspect(node, now)

    def _interval(self, node: Node) -> float:
        """Seconds between two signs of life of a node: an older robust-task only reports."""
        return (node.hello.vouches and self._state.pulse) or self._state.interval

    def _tick(self) -> float:
        return max(LOOKS_LEAST, LOOKS * (self._state.pulse or self._state.interval))

    def _notice(self, now: float) -> None:
        """Note when this process itself was late: then no node is to blame for being late."""
        if now - self._looked > self._tick() + HELD_UP:
            self.held_up = now
        self._looked = now

    def _learn(self) -> None:
        """Note how long nodes were silent that were lost and then reinstated."""
        for key, word in list(self._given_up.items()):
            node = self._state.nodes[key]
            if not node.gone:
                del self._given_up[key]
                self.stumbled(node.last_word - word)

    def _suspect(self, node: Node, now: float) -> None:
        case = self._cases[node.key] = _Case(node, node.last_word, now)
        start_task(self._tasks, self._follow(case)).add_done_callback(lambda _: self._over(case))

    def _over(self, case: _Case) -> None:
        del self._cases[case.node.key]
        self._words[case.node.key] = case.word  # from now on its silence alone decides

    # -- one suspect

    async def _follow(self, case: _Case) -> None:
        node, due = case.node, case.word + self._interval(case.node)
        limit = self.patience.limit(case.asked)
        seconds = max(EVERY, due + limit - case.asked)
        every = max(EVERY, seconds / ATTEMPTS)
        seconds += LEFT  # it may answer again while the witnesses' answers are awaited
        again = [every * n for n in range(1, int(seconds / every))]
        direct = asyncio.create_task(probe(node.address, node.hello.probe_port, seconds, again))
        try:
            await asyncio.wait({direct}, timeout=UNANSWERED)
            if _answered(direct) or node.gone or self._unanswered_beside(case) >= MANY:
                return
            case.unanswered = True
            near = self._near(node)
            for other in near:
                if other.last_word <= case.asked:
                    start_task(self._tasks, self._sign(other))
            witnesses = self.witnesses.of(node)
            found = await self._hear(case, direct, due + limit, witnesses, near)
        finally:
            direct.cancel()
        if found == "lost":
            where = f"{node.address}:{node.hello.probe_port}"
            names = fold_hosts(sorted(one.name for one in witnesses))
            silent = time.monotonic() - case.word
            why = f"no report for {silent:.1f} s; neither robust-srun nor {names} can reach {where}"
            self._given_up[node.key] = case.word
            self._lost(node, case.asked, why)
        elif found == "back":
            self.stumbled(time.monotonic() - case.word)
        elif found == "reached":
            await self._accompany(case)

    async def _hear(
        self,
        case: _Case,
        direct: asyncio.Task[Answer],
        end: float,
        witnesses: Sequence[Node],
        near: Sequence[Node],
    ) -> Found:
        """Wait for the other nodes' answers. ``end``: time from which the node may be lost."""
        node, state = case.node, self._state
        able = sum(other.name != state.own_node for other in near)
        seconds = max(EVERY, end - time.monotonic())
        with self._ask(node, witnesses, seconds) as request:
            while (now := time.monotonic()) < end + LEFT:
                self._notice(now)
                if node.gone or state.ending or self.held_up > case.word:
                    return "open"
                if node.last_word > case.word or _answered(direct):
                    return "back"
                said = [reply for _, reply in request.replies]
                seen = OverdueNode(
                    end,
                    able,
                    [reply.tried for reply in said if reply.answer == "unreachable"],
                    any(reply.answer != "unreachable" for reply in said),
                    sum(self._unheard(other, case.asked) for other in (*near, *witnesses)),
                    self._unanswered_beside(case),
                )
                verdict = judge(seen, now)
                if verdict == "lost":
                    return "lost"
                if verdict == "reached":
                    case.vouched, case.unanswered = now, False
                    if all(reply.tried > 1 for reply in said):  # no witness could at first
                        self.stumbled(now - case.word)
                    return "reached"
                await asyncio.sleep(LOOK)
        return "open"

    async def _accompany(self, case: _Case) -> None:
        """Ask the witnesses again, as long as only they can reach the node."""
        node = case.node
        while not node.gone and node.last_word == case.word:
            await asyncio.sleep(AGAIN)
            with self._ask(node, self.witnesses.of(node), AGAIN) as request:
                if not await request.until(lambda: _reached(request), 2 * AGAIN):
                    return
                case.vouched = time.monotonic()

    def _ask(
        self, node: Node, witnesses: Sequence[Node], seconds: float
    ) -> AbstractContextManager[OpenRequest[Reached]]:
        address, port = node.address, node.hello.probe_port
        return self._state.bus.ask(
            Reached,
            lambda token: [(one, Reach(token, address, port, seconds)) for one in witnesses],
            repeat=False,
        )

    def _unanswered_beside(self, case: _Case) -> int:
        return sum(other.unanswered for other in self._cases.values() if other is not case)

    def _near(self, node: Node) -> list[Node]:
        return neighbours(sorted(self._state.live(), key=job_order), node)

    def _unheard(self, node: Node, since: float) -> bool:
        return max(node.last_word, self._signs.get(node.key, 0.0)) <= since

    async def _sign(self, node: Node) -> None:
        asked = time.monotonic()
        if await probe(node.address, node.hello.probe_port, SIGN, (0.1, 0.2)) != "unreachable":
            self._signs[node.key] = asked


def late(interval: float) -> float:
    """Return the seconds that a sign of life may be late before its node is asked."""
    return max(LATE_LEAST, LATE * interval)


def _answered(task: asyncio.Task[Answer]) -> bool:
    return task.done() and task.result() != "unreachable"


def _reached(request: OpenRequest[Reached]) -> bool:
    return any(reply.answer != "unreachable" for _, reply in request.replies)
