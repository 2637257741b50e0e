"""The only sender of messages to the node agents, and the collector of their replies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from srun_wrapper.job.changes import Changes
from srun_wrapper.job.model import AgentKey, Node
from srun_wrapper.protocol.base import Message, Reply
from srun_wrapper.protocol.messages import Finish, Start, Stop

R = TypeVar("R", bound=Reply)
Address = tuple[AgentKey, int]
"""A slot of a node. A node agent that replies for the whole node is slot 0."""


class OpenRequest(Generic[R]):
    """One request to several slots, and the replies to it so far."""

    def __init__(self, token: int, kind: type[R], changed: Changes) -> None:
        self.token = token
        self.orders: list[tuple[Node, Message]] = []  # those to repeat on a new connection
        self.replies: list[tuple[Node, R]] = []
        self._kind = kind
        self._changed = changed
        self._from: set[Address] = set()

    def add(self, node: Node, reply: Reply) -> None:
        address = node.key, getattr(reply, "local", 0)
        if isinstance(reply, self._kind) and address not in self._from:
            self.replies.append((node, reply))
            self._from.add(address)

    def unanswered(self, node: Node) -> list[Message]:
        """Return the orders that may not have reached the node, or whose reply was lost."""
        return [
            order
            for to, order in self.orders
            if to is node and (node.key, getattr(order, "local", None)) not in self._from
        ]

    def answered(self, wanted: Set[Address]) -> bool:
        """True if all of these slots have replied."""
        # Counted before they are compared: ten thousand stores answer one by one.
        return len(self.replies) >= len(wanted) and wanted <= self._from

    async def until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``ready()``; False when ``timeout`` seconds pass first."""
        return await self._changed.until(ready, timeout)


class Bus:
    """Sends all messages to nodes; other parts of the supervisor send through it."""

    def __init__(self, nodes: Mapping[AgentKey, Node], changed: Changes) -> None:
        self._nodes = nodes
        self._changed = changed
        self._tokens = itertools.count(1)
        self._open: dict[int, OpenRequest[Any]] = {}

    def send(self, node: Node, message: Message) -> None:
        """Send a message. Start, Stop and Finish become the node's standing order."""
        if isinstance(message, Start | Stop | Finish):
            node.order = message
        self.send_once(node, message)

    def send_once(self, node: Node, message: Message) -> None:
        """Send a message that is lost if the node is not connected now."""
        if node.connection is not None:
            node.connection.send(message)

    def broadcast(self, message: Message) -> None:
        """Send a message to all nodes that are in the job."""
        for node in self._nodes.values():
            if not node.gone:
                self.send(node, message)

    def resend(self, node: Node) -> None:
        """Send again, on a new connection, the orders that the node did not obey or answer."""
        if node.order is not None and not _obeyed(node, node.order):
            self.send_once(node, node.order)
        for request in self._open.values():
            for order in request.unanswered(node):
                self.send_once(node, order)

    @contextmanager
    def ask(
        self,
        kind: type[R],
        orders: Callable[[int], Iterable[tuple[Node, Message]]],
        *,
        repeat: bool = True,
    ) -> Iterator[OpenRequest[R]]:
        """Send a request to several nodes and collect the replies until the block ends.

        ``kind``: the class of the replies; ``orders``: the messages, given the request's token;
        ``repeat``: send them again on a new connection; the nodes recognize a repeated request.
        """
        request = OpenRequest(next(self._tokens), kind, self._changed)
        self._open[request.token] = request
        try:
            sent = list(orders(request.token))
            request.orders = sent if repeat else []
            for node, message in sent:
                self.send(node, message)
            yield request
        finally:
            del self._open[request.token]

    def deliver(self, node: Node, reply: Reply) -> None:
        """Hand a reply to its request; drop it if the request is closed."""
        request = self._open.get(reply.token)
        if request is not None:
            request.add(node, reply)


def _obeyed(node: Node, order: Message) -> bool:
    """True if the node is known to have received ``order``, its last order."""
    if isinstance(order, Start):
        return node.hello.epoch >= order.epoch
    if isinstance(order, Stop):
        return node.stopped >= order.epoch
    return False
