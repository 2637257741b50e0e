"""Witnesses: nodes that can tell whether another node is reachable, tested while all is well."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from srun_wrapper.detect.unreachable import WITNESSES, choose
from srun_wrapper.job.model import AgentKey, Node
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.peer_messages import Reach, Reached

PROOF = 0.75  # s for a node to reach another that is well
SLACK = 1.0  # s for its answer to come
AT_A_TIME = 32  # nodes for which witnesses are tested at a time
ROUND = 1.0  # s between two looks for nodes that lack witnesses


def job_order(node: Node) -> tuple[int, int]:
    """Return the sort key for Slurm's order, in which neighbours have consecutive numbers."""
    return node.standby_request, node.key[2]


class Witnesses:
    """Knows which node has reached which: only their failures count, others may be a firewall's."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._proven: dict[AgentKey, set[AgentKey]] = {}  # by the node that was reached
        self._tried: dict[AgentKey, set[AgentKey]] = {}
        self._proving: dict[AgentKey, asyncio.Task[None]] = {}
        self._next = 0.0

    def of(self, node: Node) -> list[Node]:
        """Return the nodes that have reached this one, and are well."""
        proven = self._proven.get(node.key, set())
        found = [self._state.nodes[key] for key in proven if key in self._state.nodes]
        return [one for one in found if not one.gone and one.connection is not None]

    def look(self, now: float) -> None:
        """Test witnesses for the nodes that lack some, a few nodes at a time."""
        if now < self._next:
            return
        self._next = now + ROUND
        nodes = sorted(self._state.live(), key=job_order)
        nodes = [n for n in nodes if n.name != self._state.own_node]
        able = [n for n in nodes if n.connection is not None and n.hello.vouches]
        for node in nodes:
            if len(self._proving) >= AT_A_TIME:
                self._next = now  # at the next look
                return
            if node.key not in self._proving and node.second_way and self._lacks(node, able):
                self._prove(node, able)

    def _lacks(self, node: Node, able: Sequence[Node]) -> bool:
        if len(self.of(node)) >= WITNESSES:
            return False
        tried = self._tried.get(node.key, set())
        return any(one.key not in tried for one in able if one is not node)

    def _prove(self, node: Node, able: Sequence[Node]) -> None:
        tried = self._tried.setdefault(node.key, set())
        fresh = [one for one in able if one is not node and one.key not in tried]
        after = sum(job_order(one) < job_order(node) for one in fresh)
        asked = choose([*fresh[:after], node, *fresh[after:]], node, WITNESSES - len(self.of(node)))
        tried.update(one.key for one in asked)
        task = asyncio.create_task(self._reach(node, asked))
        self._proving[node.key] = task
        task.add_done_callback(lambda _: self._proving.pop(node.key, None))

    async def _reach(self, node: Node, asked: Sequence[Node]) -> None:
        address, port = node.address, node.hello.probe_port
        with self._state.bus.ask(
            Reached,
            lambda token: [(one, Reach(token, address, port, PROOF)) for one in asked],
            repeat=False,
        ) as request:
            await request.until(lambda: len(request.replies) == len(asked), PROOF + SLACK)
            said = {one.key for one, reply in request.replies if reply.answer == "accepted"}
        self._proven.setdefault(node.key, set()).update(said)
