"""Measure how long it takes to locate a stuck rank among 10,000, from the nodes' messages on.

``python -m bench.stacks [--quick] [--json FILE]``: synthetic ranks, 8 on a node, pp=10 and tp=8,
with stacks of 19 frames, 6 more threads each and 2 workers of a loader. One case has one rank
outside all collectives, the other a pipeline whose 10 nodes stand out (ByteRobust's example).
``decode_s`` is spread over the time in which the messages come; ``aggregate_s`` comes in one piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.common import Results, main
from srun_wrapper.detect.rank_views import rank_views
from srun_wrapper.job.model import Node, Role, World
from srun_wrapper.locate.locate import Located, locate
from srun_wrapper.locate.story import story
from srun_wrapper.protocol.looking_messages import LOADER, RANK, Look, ThreadStack
from srun_wrapper.protocol.messages import Hello, Inspected, SlotActivity, decode_from_agent, encode

RANKS, PER_NODE, RUNS = 10_000, 8, 20
MESH = {"dp": 125, "pp": 10, "tp": 8}
C10D = "torch/distributed/distributed_c10d.py"
OUTER = tuple(f"call_{n} (training/loop_{n}.py:{n})" for n in range(16))
SYNC = (f"all_reduce ({C10D}:3032)", f"wrapper ({C10D}:81)", "reduce (optim.py:9)", *OUTER)
SEND = (f"isend ({C10D}:9)", "send_forward (schedule.py:9)", *OUTER)
STUCK = ("augment (data.py:3)", "fetch (data.py:9)", *OUTER)
LOOP = ("poll (selectors.py:1)", "get (queues.py:9)", "_worker_loop (worker.py:3)", *OUTER)


def looks(rank: int, stack: tuple[str, ...]) -> tuple[Look, ...]:
    threads = tuple(ThreadStack(f"thread-{n}", OUTER) for n in range(6))
    own = Look(rank + 1, RANK, "S", rank, rank % PER_NODE, (ThreadStack("main", stack), *threads))
    loader = Look(rank + 2, LOADER, "S", rank, -1, (ThreadStack("main", LOOP),))
    return (own, loader, loader)


def wire(stack_of: Callable[[int], tuple[str, ...]], count: int) -> list[bytes]:
    """Return the nodes' messages as they come."""
    made = []
    for first in range(0, count, PER_NODE):
        samples = tuple(
            SlotActivity(
                local, "S", 0.0, 0, (), False, looks(first + local, stack_of(first + local))
            )
            for local in range(PER_NODE)
        )
        made.append(encode(Inspected(1, 0.2, samples)))
    return made


def world(count: int) -> World:
    places, ranks = [], []
    for index in range(count // PER_NODE):
        tasks = tuple(range(index * PER_NODE, (index + 1) * PER_NODE))
        said = Hello(1, "0", index, f"n{index}", tasks, 1, 1, 1, 1, 0, 1)
        places.append(Node((1, "0", index), f"n{index}", "", said, None, Role.ACTIVE, 0.0, 1))
        ranks.append(tasks)
    made = World(1, places, ranks)
    made.begin(1)
    return made


def measure(
    results: Results,
    name: str,
    stack_of: Callable[[int], tuple[str, ...]],
    right: Callable[[Located], bool],
) -> None:
    messages, job = wire(stack_of, RANKS), world(RANKS)
    decoding, aggregating = [], []
    for _ in range(3 if results.quick else RUNS):
        since = time.perf_counter()
        replies = [decode_from_agent(message) for message in messages]
        decoded = time.perf_counter()
        views = rank_views(
            job, [(node, reply.samples) for node, reply in zip(job.places, replies, strict=True)]
        )
        found = locate(views, MESH)
        lines = story(views, found)
        decoding.append(decoded - since)
        aggregating.append(time.perf_counter() - decoded)
        assert right(found) and len(lines) <= 10, (found, lines)
    results.add(f"{name}.decode_s", decoding, "s")
    results.add(f"{name}.aggregate_s", aggregating, "s")
    results.settings |= {
        "ranks": RANKS,
        "nodes": RANKS // PER_NODE,
        "mesh": ",".join(f"{key}={value}" for key, value in MESH.items()),
        f"{name} message of a node, KiB": round(len(messages[0]) / 1024, 1),
    }


def one_stuck(results: Results) -> None:
    stuck = 4321
    measure(
        results,
        "one_stuck",
        lambda rank: STUCK if rank == stuck else SYNC,
        lambda found: found.nodes == (f"n{stuck // PER_NODE}",),
    )


def pipeline(results: Results) -> None:
    """All ranks of the last pipeline wait for each other, all others have gone on."""
    size = MESH["pp"] * MESH["tp"]
    measure(
        results,
        "pipeline",
        lambda rank: SEND if rank >= RANKS - size else SYNC,
        lambda found: len(found.group) == size and len(found.nodes) == size // PER_NODE,
    )


CASES = {"one_stuck": one_stuck, "pipeline": pipeline}


if __name__ == "__main__":
    raise SystemExit(main("stacks", CASES))
