"""The orders that begin an epoch and end the shims, from the roster (pure)."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence

from robust_slurm.checkpoint.store.events import Restore
from robust_slurm.data.exchange.placement import LEAST, MOST, VARIABLE
from srun_wrapper.command.rank_env import node_env, only_ours, only_slurm, rank_env, world_env
from srun_wrapper.job.model import Node, Role, World
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Finish, Peer, RankStart, Start

PEERS = 8  # agents that each agent knows, to ask when the supervisor is silent


def start_orders(
    state: JobState,
    grace: float,
    reason: str,
    extra: Mapping[str, str],
    resume_step: int | None = None,
    restore_of: Callable[[Node], Restore | None] = lambda _node: None,
    rejoin: bool = False,
) -> list[tuple[Node, Start]]:
    """Open the next epoch, and return the order to each place's node.

    ``reason``: why, "" for the first epoch; ``extra``: more environment for all ranks;
    ``resume_step`` and ``restore_of`` (a node's part): what the ranks are restored from;
    ``rejoin``: ranks that wait go on.
    """
    epoch = state.new_epoch()
    world = state.world
    master = next(n for n, ranks in zip(world.places, world.ranks, strict=True) if 0 in ranks)
    shared = world_env(
        names=[n.name for n in world.places],
        ranks=world.ranks,
        epoch=epoch,
        master_addr=master.address,
        master_port=master.free_port,
        restart_reason=reason,
        resume_step=resume_step,
        resized=world.resized,
        replica_ranks=world.replica_ranks,
        job_id=state.job_id,
        step_id=state.step_id,
    )
    cut = dict if state.config.rank_env else only_slurm
    if state.config.mode == "observe":
        cut = only_ours  # srun has laid the step out, so the variables that it set are right
    peers = tuple(
        Peer(i, n.address, n.hello.probe_port) for i, n in enumerate(world.places[:PEERS])
    )
    lanes = [(n.address, n.hello.data_port) for n in world.places]
    moved = [node.key[2] for node in world.places] != list(range(len(world.places)))
    return [
        (
            node,
            Start(
                epoch=epoch,
                env=cut({**shared, **node_env(index=index, name=node.name, ranks=ranks)})
                | data_nodes(index, lanes)
                | dict(extra),
                ranks=tuple(
                    RankStart(local, rank, cut(rank_env(rank=rank, local=local)))
                    for local, rank in enumerate(ranks)
                ),
                grace=grace,
                index=index,
                first=epoch == 1,
                nodes=len(world.places),
                master=master.address,
                port=master.free_port,
                peers=peers,
                restore=restore_of(node),
                moved=moved,
                code=state.code,
                rejoin=rejoin,
            ),
        )
        for index, (node, ranks) in enumerate(zip(world.places, world.ranks, strict=True))
    ]


def data_nodes(index: int, nodes: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Return the variable by which data processes know one another (``data/exchange``)."""
    if not LEAST <= len(nodes) <= MOST:
        return {}
    return {VARIABLE: json.dumps([index, nodes], separators=(",", ":"))}


def finish_order(world: World, node: Node) -> Finish:
    """Return the order by which each shim ends as its rank did; of a stopped rank, by SIGTERM."""
    exits = []
    place = world.place_of(node) if node.role is Role.ACTIVE else None
    ranks = 0 if place is None else len(world.ranks[place])
    for local in range(node.slots):
        rank = world.rank_at(node, local) if local < ranks else None
        code, signum = (0, 0) if rank is None else rank.exit or (0, int(signal.SIGTERM))
        exits.append((code, signum))
    return Finish(tuple(exits))
