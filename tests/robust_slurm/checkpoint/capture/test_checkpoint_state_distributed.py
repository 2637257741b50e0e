"""DDP, FSDP2 and DTensor between two real processes; strided shards without any."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from places import TESTS
from torch_forks import TorchForks, all_end_well

pytestmark = pytest.mark.slow

SCRIPT = TESTS / "support" / "checkpoint" / "checkpoint_ranks.py"
CASES = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


@pytest.fixture(scope="module")
def results(
    torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    directory = tmp_path_factory.mktemp("ranks")
    code = SCRIPT.read_text()
    ranks = [torch_forks.start(code, str(rank), "2", str(directory)) for rank in range(2)]
    for rank in ranks:
        rank.wait(120)
    return [
        json.loads(path.read_text()) if path.exists() else {}
        for path in (directory / f"result-{r}.json" for r in range(2))
    ]


@pytest.mark.parametrize("case", CASES)
def test_between_ranks(case: str, results: list[dict[str, str]]) -> None:
    for rank, result in enumerate(results):
        said = result.get(case, "not run: an earlier case failed")
        assert said == "ok", f"rank {rank}: {said}"


STRIDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from robust_slurm.checkpoint.capture.shards import make, shard_of

strided = _StridedShard(0, split_factor=2)
for rank, rows, held, second in [
    (0, 8, 2, Shard(0)), (1, 8, 2, Shard(0)), (2, 8, 2, Shard(0)), (3, 8, 2, Shard(0)),
    (3, 7, 1, Shard(0)), (0, 8, 4, Replicate()),
]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = DTensor.from_local(
        torch.zeros(held, 3), mesh, [strided, second],
        run_check=False, shape=torch.Size([rows, 3]), stride=(3, 1),
    )
    shard = shard_of(tensor)
    print(shard.kind, shard.offsets[0], *shard.placements)
    again = make(shard.local, tensor, shard.placements, shard.mesh, (rows, 3), "t")
    assert again.placements == tensor.placements and again.shape == tensor.shape
    dist.destroy_process_group()
"""


def test_strided_shards(torch_forks: TorchForks) -> None:
    """FSDP over tensor parallelism: the columns of the mesh are cut first."""
    fork = torch_forks.start(STRIDED)
    all_end_well([fork])
    assert fork.out().splitlines() == [
        "block 0 SS0/2 S0",
        "block 4 SS0/2 S0",
        "block 2 SS0/2 S0",
        "block 6 SS0/2 S0",
        "block 6 SS0/2 S0",
        "private 0 SS0/2 R",  # rows 0, 1, 4 and 5: not one block
    ]


def test_a_plain_script_pays_for_no_import_that_it_does_not_need(tmp_path: Path) -> None:
    """With torch.distributed.checkpoint a training begins a second later."""
    code = (
        "import sys, torch; had = set(sys.modules)\n"
        "import robust_slurm\n"
        "model = torch.nn.Linear(1, 1)\n"
        "ckpt = robust_slurm.Checkpointer(model=model, directory=sys.argv[1], every=1)\n"
        "start = ckpt.resume(); ckpt.save(start + 1); ckpt.close()\n"
        "unwanted = ('torch.distributed.checkpoint', 'torch.distributed.tensor', 'sympy')\n"
        "assert not set(unwanted) & (set(sys.modules) - had)\n"
        "print(start)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    for start in ("0", "1"):
        done = subprocess.run(argv, check=True, cwd=SCRIPT.parents[1], capture_output=True)
        assert done.stdout.decode().splitlines()[-1] == start
