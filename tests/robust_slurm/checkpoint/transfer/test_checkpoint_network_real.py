"""Bytes that a resume really moves: real trainings and stores, every byte between nodes counted."""

from __future__ import annotations

import re
import socket
from collections import Counter
from pathlib import Path

import pytest
from checkpoint_stores import Proxy, stores
from torch_forks import Fork, TorchForks
from waiting import until

from robust_slurm.checkpoint.planning.placement import place
from robust_slurm.checkpoint.planning.plan import Holder, Seat, plan
from robust_slurm.checkpoint.store.events import EnrolledEvent, Restore, Target, WantedSnapshot
from robust_slurm.checkpoint.store.store import Store

pytestmark = pytest.mark.slow

WORLD, STEPS, LOST = 4, 6, 2
SCRIPT = """
import os, sys, time, zlib, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import robust_slurm
kind, last = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])
torch.manual_seed(5)
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(500, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 500))
mesh, alike = None, None
if kind == "DDP":
    model = torch.nn.parallel.DistributedDataParallel(model)
elif kind == "pp x dp":
    mesh = {"pp": 2, "dp": 2}
    groups = [dist.new_group([2 * stage, 2 * stage + 1]) for stage in range(2)]
    alike, model = groups[rank // 2], model[2 * (rank // 2)]
else:
    from torch.distributed.fsdp import fully_shard
    shape = {"dp_shard": 4} if kind == "FSDP2" else {"dp_replicate": 2, "dp_shard": 2}
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ckpt = robust_slurm.Checkpointer(model=model, optimizer=optimizer, mesh=mesh)
first = ckpt.resume()

def held():
    found = [*model.parameters()]
    for parameter in model.parameters():
        found += [v for _, v in sorted(optimizer.state[parameter].items())]
    return [(t.to_local() if hasattr(t, "to_local") else t).detach() for t in found]

def report(step):
    crc = 0
    for tensor in held():
        crc = zlib.crc32(tensor.contiguous().numpy().tobytes(), crc)
    print(f"step {step} {crc} {sum(t.nbytes for t in held())}", flush=True)

if first:
    report(first)
torch.manual_seed(rank)
for step in range(first + 1, last + 1):
    x = torch.randn(4, 1000 if kind == "pp x dp" and rank > 1 else 500)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if alike is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=alike)
    optimizer.step()
    report(step)
    ckpt.save(step)
print("held", flush=True)
sys.stdin.readline()
time.sleep(300)
"""


def start(forks: TorchForks, kind: str, last: int, epoch: int, at: list[Store]) -> list[Fork]:
    """The ranks of an epoch, each with its node's store; they stay when they are done."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD),
        "ROBUST_EPOCH": str(epoch), "ROBUST_RUN_ID": "77",
    }  # fmt: skip
    return [
        forks.start(
            SCRIPT, kind, str(last),
            env={**env, "RANK": str(rank), "ROBUST_CKPT_SOCKET": str(at[rank].socket_path)},
        )
        for rank in range(WORLD)
    ]  # fmt: skip


def held(ranks: list[Fork]) -> list[dict[int, tuple[int, int]]]:
    """Return, once all are done, for each rank: step → (checksum, bytes) of what it holds."""
    until(lambda: all("held" in r.out() for r in ranks), "".join(r.err() for r in ranks), 120)
    found = [re.findall(r"step (\d+) (\d+) (\d+)", r.out()) for r in ranks]
    return [{int(s): (int(crc), int(size)) for s, crc, size in lines} for lines in found]


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("DDP", {}),
        ("FSDP2", {"dp_shard": 4}),
        ("HSDP", {"dp_replicate": 2, "dp_shard": 2}),
        ("pp x dp", {"pp": 2, "dp": 2}),
    ],
)
def test_a_resume_after_the_loss_of_a_node(
    tmp_path: Path, torch_forks: TorchForks, kind: str, mesh: dict[str, int]
) -> None:
    with stores(tmp_path, WORLD + 1, patience=20.0) as made:
        nodes = [store for store, _ in made]
        for node in nodes:
            node.begin(1, None)
        ranks = start(torch_forks, kind, STEPS, 1, nodes)
        for _, events in made[:WORLD]:
            until(lambda events=events: events.of(EnrolledEvent), "enrolled", 120)  # type: ignore[misc]
        holders = place([f"n{rank}" for rank in range(WORLD)], mesh)
        for rank, holder in enumerate(holders):
            assert holder is not None
            nodes[rank].place({rank: Target(holder, "127.0.0.1", nodes[holder].port, f"n{holder}")})
        before = held(ranks)
        for rank, holder in enumerate(holders):
            until(
                lambda at=nodes[holder or 0], rank=rank: any(
                    (h.owner, h.step, h.tier) == (rank, STEPS, "replica") for h in at.stock()
                ),
                f"the replica of rank {rank}",
            )  # fmt: skip
        files = nodes[0].socket_path.parent.glob("*.safetensors")
        sizes = {file.name: file.stat().st_size for file in files}
        memory = sum(sizes.values()) / before[0][STEPS][1]
        pushed = max(s for n, s in sizes.items() if n.startswith("own-0-")) / before[0][STEPS][1]
        for each in ranks:
            each.kill()
        nodes[LOST].close()
        seat = [WORLD if rank == LOST else rank for rank in range(WORLD)]
        places = [
            Holder(str(n), f"n{n}", "127.0.0.1", nodes[n].port, nodes[n].stock()) for n in set(seat)
        ]
        resume = plan(places, {r: Seat(str(n), f"n{n}") for r, n in enumerate(seat)}, WORLD)
        assert (resume.step, resume.tier) == (STEPS, "memory")
        received: Counter[int] = Counter()
        for moved in resume.transfers:
            wire = Proxy(moved.port, 1 << 40)  # counts both ways
            wanted = WantedSnapshot(moved.owner, moved.step, moved.host, wire.port)
            (outcome,) = nodes[int(moved.target)].fetch([wanted])
            assert outcome.ok, outcome
            received[int(moved.target)] += wire.passed
            wire.close()
        for n in set(seat):
            nodes[n].begin(2, Restore(STEPS, "memory", resume.shards(f"n{n}")))
        again = held(start(torch_forks, kind, STEPS, 2, [nodes[n] for n in seat]))
        assert [each[STEPS][0] for each in again] == [each[STEPS][0] for each in before]
        ratio = {rank: received[n] / before[rank][STEPS][1] for rank, n in enumerate(seat)}
        print(
            f"\n{kind}: own state {before[LOST][STEPS][1] / 1e6:.2f} MB; received: lost rank's "
            f"new node {ratio[LOST]:.2f} of it, others at most "
            f"{max(r for rank, r in ratio.items() if rank != LOST):.2f}; "
            f"memory of a node {memory:.2f} of it; pushed at each step {pushed:.2f} of it"
        )
        assert ratio[LOST] > 0.9 and max(ratio.values()) <= 1.5, ratio
