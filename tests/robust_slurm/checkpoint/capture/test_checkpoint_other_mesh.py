"""FSDP2 and HSDP in worlds of fewer ranks and of all again: blocks are cut anew, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from places import TESTS
from torch_forks import TorchForks, all_end_well

from robust_slurm.checkpoint.capture.shards import tile
from srun_wrapper.agent.processes.ports import free_port

SCRIPT = TESTS / "support" / "checkpoint" / "other_mesh_ranks.py"


@pytest.mark.slow
def test_blocks_of_another_world_are_cut_anew_bit_by_bit(
    torch_forks: TorchForks, tmp_path: Path
) -> None:
    """FSDP2 4 → 3 → 4, and HSDP 2 × 2 → 1 × 2 → 2 × 2, each rank with the snapshots it is given.

    The second rank is lost; every world trains a step between, so that its state is its own.
    """
    for number, (kind, size) in enumerate(
        [("both", 4), ("fsdp", 3), ("hsdp", 2), ("fsdp", 4), ("hsdp", 4)]
    ):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= {"WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
        words = [str(tmp_path), kind, str(number)]
        code = SCRIPT.read_text()
        ranks = [torch_forks.start(code, *words, env=env | {"RANK": str(r)}) for r in range(size)]
        all_end_well(ranks, 120.0)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    # Of 12 columns, and 9, 3 and 1 rows, rank 0 of 3 has those of ranks 0 and 1 of 4.
    assert found["fsdp-1-0"] == [0, 1, 3]  # 3: it had the share that is rank 0's now
    assert found["fsdp-1-2"] == [2, 3]
    assert found["hsdp-2-0"] == [0, 2] and found["hsdp-2-1"] == [1, 3]


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        ([((3, 2), (0, 0)), ((3, 2), (3, 0)), ((2, 2), (6, 0))], [0, 3]),
        ([((8, 2), (0, 0))], [0]),
        ([((3, 2), (0, 0)), ((2, 2), (6, 0))], "of the 6 items that are this rank's, 2 are there"),
        ([((4, 2), (0, 0)), ((5, 2), (3, 0))], "there twice"),
        ([], "0 are there"),
        ([((8, 1), (0, 0)), ((8, 1), (0, 1))], [0, 0]),
    ],
)
def test_a_block_is_put_together_only_if_each_item_is_there_once(
    blocks: list[tuple[tuple[int, ...], tuple[int, ...]]], found: list[int] | str
) -> None:
    target = (3, 2), (2, 0)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            tile(target, blocks)
    else:
        assert [offsets[0] for _, offsets in tile(target, blocks)] == found
    assert tile(((0, 2), (8, 0)), blocks) == []
