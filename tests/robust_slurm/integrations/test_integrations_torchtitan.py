"""torchtitan's Trainer (the real one) with our manager: killed, it ends as if undisturbed."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from ckpt_jobs import read_lines
from extras import needs
from framework_runs import run, undisturbed
from torch_forks import TorchForks

pytestmark = [pytest.mark.slow, needs("torchtitan", "frameworks")]
STEPS = 8
PROGRAM = "fw_torchtitan.py"
READ = 4  # samples of a rank's step


@pytest.fixture(scope="module")
def forks() -> Iterator[TorchForks]:
    with TorchForks("torch._dynamo", "datasets", "tensorboard") as forks:
        yield forks


def test_killed_it_ends_as_if_it_never_was(forks: TorchForks, tmp_path: Path) -> None:
    """FSDP2 over two ranks, each with its own data."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    amid = random.randrange(4, STEPS)
    kills = [amid, -random.randrange(amid, STEPS)]  # within a step; after one that is on disk
    whole = undisturbed(forks, PROGRAM, tmp_path / "whole", STEPS, "--workers=1", ranks=2)
    again = run(forks, PROGRAM, tmp_path / "killed", STEPS, kills, "--workers=1", ranks=2)
    assert again == whole, f"killed: {kills}"
    assert list(whole.curve) == list(range(1, STEPS + 1))
    for rank in range(2):
        lines = read_lines(tmp_path / "killed" / f"rank-{rank}.jsonl")
        resumed = {line["epoch"]: line["resumed"] for line in lines if "resumed" in line}
        assert 0 < resumed[2] < amid and resumed[3] == -kills[1]
        read = (tmp_path / "killed" / f"read-{rank}").read_text().splitlines()
        for start in (2, 3):
            first = next(line for line in read if line.startswith(f"{start} "))
            assert first == f"{start} {READ * resumed[start]}"  # nothing trained is read again


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose CheckpointManager is elsewhere."""
    monkeypatch.delitem(sys.modules, "robust_slurm.integrations.torchtitan", raising=False)
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.checkpoint"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(RuntimeError, match=r"torchtitan 0\.\S+ has no .*CheckpointManager.*tested"):
        importlib.import_module("robust_slurm.integrations.torchtitan")
