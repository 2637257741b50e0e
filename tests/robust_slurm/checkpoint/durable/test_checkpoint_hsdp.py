"""HSDP: ranks at one place of two shard groups hold the same blocks; they are saved once."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path

import pytest
from torch_forks import TorchForks

from robust_slurm.checkpoint.durable import tier

pytestmark = pytest.mark.slow

WORLD = 4
SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import robust_slurm
directory, kill_at = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])
torch.manual_seed(5)
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
model = torch.nn.Sequential(
    torch.nn.Linear(64, 257), torch.nn.Dropout(0.1), torch.nn.Linear(257, 63),
    torch.nn.Linear(63, 1),
)
for part in model:
    fully_shard(part, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(100 + rank)
ckpt = robust_slurm.Checkpointer(
    model=model, optimizer=optimizer, directory=directory, every=4, mesh=mesh
)
first = ckpt.resume()
print(f"rank {rank} resumed {first}", flush=True)
for step in range(first + 1, 7):
    loss = model(torch.randn(4, 64)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    ckpt.save(step)
    sums = [p.to_local().double().sum().item().hex() for p in model.parameters()]
    print(f"rank {rank} step {step} {loss.item().hex()} {' '.join(sums)}", flush=True)
    if step == kill_at:
        if rank == 0:
            held = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
            print("state", sum(t.numel() * t.element_size() for t in held), flush=True)
        wanted = os.path.join(directory, "step-00000004", "manifest.json")
        end = time.monotonic() + 120
        while not os.path.exists(wanted) and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
ckpt.close()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # programs/teardown.py says why
"""


def run(forks: TorchForks, directory: Path, kill_at: int = 0) -> tuple[str, str, set[int]]:
    """Run the ranks; return their stdout, stderr and exit codes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    words = [str(directory), str(kill_at)]
    ranks = [forks.start(SCRIPT, *words, env={**env, "RANK": str(r)}) for r in range(WORLD)]
    codes = {rank.wait() for rank in ranks}
    out, err = ("".join(text) for text in zip(*((r.out(), r.err()) for r in ranks), strict=True))
    return out, err, codes


def steps(out: str) -> dict[tuple[str, str], str]:
    found = re.findall(r"^rank (\d) step (\d+) (.*)$", out, re.MULTILINE)
    return {(rank, step): rest for rank, step, rest in found}


def test_blocks_that_two_ranks_hold_are_written_once_and_restored_to_both(
    tmp_path: Path, torch_forks: TorchForks
) -> None:
    """Killed in its last step, the training does its last two steps again as it did them."""
    out, err, codes = run(torch_forks, tmp_path, kill_at=6)
    assert codes == {-signal.SIGKILL}, err
    truth = steps(out)
    assert len(truth) == 6 * WORLD
    newest = tier.newest(tmp_path)
    (state,) = map(int, re.findall(r"^state (\d+)$", out, re.MULTILINE))
    assert newest is not None and newest.step == 4
    print(f"\nHSDP 2 x 2: {newest.bytes / 1e6:.2f} MB on disk for {state / 1e6:.2f} MB of state")
    records = 2 * WORLD * 40 * 1024  # torch.save's frames, generators and values
    assert newest.bytes < state + records, (newest.bytes, state)
    out, err, codes = run(torch_forks, tmp_path)
    assert codes == {0}, err
    assert out.count("resumed 4\n") == WORLD
    assert steps(out) == {key: line for key, line in truth.items() if int(key[1]) > 4}
