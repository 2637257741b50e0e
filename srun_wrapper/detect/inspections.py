"""Ask nodes to look at their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from srun_wrapper.job.model import AgentKey, Node, Role
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Inspect, Inspected

REPLY = 12.0  # s for all nodes to answer
Replies = Mapping[AgentKey, Inspected]


def active(state: JobState, among: Replies | None = None) -> list[Node]:
    """Return the connected nodes that have ranks; of ``among``, only those that have replied."""
    found = [n for n in state.world.places if n.role is Role.ACTIVE and n.connection]
    return found if among is None else [node for node in found if node.key in among]


async def inspect(
    state: JobState,
    nodes: Sequence[Node],
    window: float,
    *,
    signals: bool = True,
    quick: bool = False,
    machine: bool = False,
) -> Replies:
    """Have these nodes inspected. Fewer reply if a new epoch begins meanwhile.

    ``window``, ``signals`` (``ask``), ``quick``, ``machine``: see ``Inspect``.
    """
    epoch = state.world.epoch
    wanted = {(node.key, 0) for node in nodes}
    # Not repeated: two debuggers at one rank exclude each other, and the rank would look frozen.
    with state.bus.ask(
        Inspected,
        lambda token: [(n, Inspect(token, window, signals, quick, machine)) for n in nodes],
        repeat=False,
    ) as asked:
        await asked.until(
            lambda: asked.answered(wanted) or state.world.epoch != epoch, window + REPLY
        )
    return {node.key: reply for node, reply in asked.replies}
