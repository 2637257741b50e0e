"""Ranks that held the same at the start and do not any more (local SGD, DiLoCo): no state is put
together from theirs."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from checkpointed_training import Training, fake_store
from torch_forks import TorchForks
from waiting import until

from robust_slurm.checkpoint.capture.sharing import Share
from robust_slurm.checkpoint.durable import tier

pytestmark = pytest.mark.slow

# Both ranks do the same up to step 3; then each goes its own way.
SCRIPT = """
import os, sys, time, zlib, torch, torch.distributed as dist
import robust_slurm
from robust_slurm.checkpoint.durable import tier
directory, steps = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])
torch.manual_seed(5)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dist.init_process_group("gloo")
ckpt = robust_slurm.Checkpointer(model=model, optimizer=optimizer, directory=directory, every=1,
                                 mesh={"dp": 2})
first = ckpt.resume()

def state():
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        tensors += [v for _, v in sorted(optimizer.state[parameter].items())]
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.detach().numpy().tobytes(), crc)
    return crc

print(f"rank {rank} at {first} {state() if first else 0}", flush=True)
for step in range(first + 1, steps + 1):
    torch.manual_seed(1000 * step + (rank if step > 3 else 0))
    x = torch.randn(4, 16)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(f"rank {rank} at {step} {state()}", flush=True)
    ckpt.save(step)
    late = time.monotonic() + 2  # some steps are left out, as those in which the ranks part
    while time.monotonic() < late and step not in {c.step for c in tier.committed(directory)}:
        time.sleep(0.02)
    dist.barrier()
ckpt.close()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # programs/teardown.py says why
"""


def run(forks: TorchForks, directory: Path, steps: int) -> tuple[dict[tuple[int, int], int], str]:
    """Return the state of each (rank, step), the resumed step first; and stderr."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    options = [str(directory), str(steps)]
    ranks = [forks.start(SCRIPT, *options, env={**env, "RANK": str(r)}) for r in range(2)]
    codes = [rank.wait() for rank in ranks]
    out, err = ("".join(text) for text in zip(*((r.out(), r.err()) for r in ranks), strict=True))
    assert codes == [0, 0], err
    found = re.findall(r"rank (\d) at (\d+) (\d+)", out)
    return {(int(r), int(s)): int(state) for r, s, state in found}, err


def test_no_rank_resumes_in_a_state_that_was_not_its_own(
    tmp_path: Path, torch_forks: TorchForks
) -> None:
    first, err = run(torch_forks, tmp_path / "a", 9)
    assert first[0, 3] == first[1, 3] and first[0, 4] != first[1, 4]
    assert "ranks (0, 1) no longer hold the same" in err
    steps = [c.step for c in tier.committed(tmp_path / "a")]
    assert steps[-1] == 9, err  # each rank saves all of its own by then
    second, err = run(torch_forks, tmp_path / "a", 9)
    assert second == {(0, 9): first[0, 9], (1, 9): first[1, 9]}, err


def test_ranks_that_part_go_on_keeping_the_newest_step_that_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks do not keep their own last step: no other rank need have it."""
    shared = "robust_slurm.checkpoint.training.mesh.find_share"
    monkeypatch.setattr(shared, lambda *_args: Share((0, 1)))
    with fake_store(tmp_path / "s", monkeypatch) as store:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        training = Training(mesh={"dp": 2})
        assert training.ckpt.resume() == 0
        training.run(1, 2)
        store.wait("saved", 2)
        store.tell("complete", step=1, passed=1)
        store.tell("unshare")
        session = training.ckpt._session
        assert session is not None and session.client is not None
        first = session.client
        until(lambda: first.unshare, "the order")
        training.run(3, 3)
        assert session.client is not first and session.client.everywhere == 1
        training.ckpt.close()
