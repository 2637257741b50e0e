"""Trainings as users write them, in two releases of each framework, killed in any batch.

`make test-frameworks` installs the earlier releases and runs them: minutes, so no part of
`make test`, which has a few kinds in the tests beside this one.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ckpt_jobs import _PROGRAM, PROGRAMS
from extras import needs
from torch_forks import Fork, TorchForks, all_end_well

from srun_wrapper.agent.processes.ports import free_port

OLDER = os.environ.get("ROBUST_TEST_OLDER", "")
pytestmark = [
    pytest.mark.slow,
    needs("lightning", "frameworks"),
    pytest.mark.skipif(not OLDER, reason="make test-frameworks runs it, and sets the variable"),
]
WAIT = 150.0  # s of one start
IMPORTS = {
    "lightning": ("lightning.pytorch", "torchdata.stateful_dataloader"),
    "transformers": ("transformers.trainer", "torchdata.stateful_dataloader"),
}
LIGHTNING = (
    "epochs", "steps", "accumulate", "clip", "val_often", "val_by_steps", "manual", "plateau",
    "step_plateau", "early_stop", "ema", "weight_averaging", "swa", "swa_norm", "noisy", "workers",
    "persistent", "persistent_noisy", "stateful", "stateful_workers", "stateful_noisy", "stream",
    "stream_steps", "two_loaders", "two_streams", "train_mean", "reload", "limited", "epochs*2",
    "accumulate*2", "manual*2", "ckpt_given",
)  # fmt: skip
TRANSFORMERS = (
    "epochs", "steps", "plateau", "grouped", "early_stop", "stream", "short_stream", "workers",
    "persistent", "noisy", "noisy_workers", "bf16", "model_init", "resume_given", "own_loader",
    "epochs*2", "steps*2", "by_hand",
)  # fmt: skip
WARNED = {
    ("lightning", "train_mean"): "the mean of mean over this epoch",
    ("lightning", "persistent_noisy"): "persistent workers",
    ("transformers", "noisy"): "draws from the process's random generators",
    ("transformers", "noisy_workers"): "workers",
}
"""Kinds that may not go on to the last bit, and what is said about it."""
SAID = {("transformers", "resume_given"): "is not used"}
BATCHES = 14  # in which a start may die; the shortest training has as many
KINDS = [
    *(("lightning", kind) for kind in LIGHTNING),
    *(("transformers", kind) for kind in TRANSFORMERS),
]


@pytest.fixture(scope="module", params=["pinned", "earlier"])
def release(request: pytest.FixtureRequest) -> str:
    """A directory of packages that come before the installed ones; empty: these."""
    return OLDER if request.param == "earlier" else ""


@pytest.fixture(scope="module")
def servers(release: str) -> Iterator[dict[str, TorchForks]]:
    lightning = TorchForks(*IMPORTS["lightning"], path=release)
    with lightning, TorchForks(*IMPORTS["transformers"], path=release) as transformers:
        yield {"lightning": lightning, "transformers": transformers}


def start(forks: TorchForks, program: str, directory: Path, ranks: int, *words: str) -> list[Fork]:
    words = (str(PROGRAMS / program), f"--dir={directory}", "--steps=0", *words)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    return [
        forks.start(
            _PROGRAM, *words,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {},
        )
        for rank in range(ranks)
    ]  # fmt: skip


@pytest.mark.parametrize(("framework", "kind"), KINDS)
def test_killed_it_ends_as_if_it_never_was(
    servers: dict[str, TorchForks], release: str, framework: str, kind: str, tmp_path: Path
) -> None:
    """Twice, in any batch: the weights at the end, the order of the data, what was logged."""
    if release and kind == "weight_averaging":
        pytest.skip("Lightning has it since 2.6")
    name, _, ranks = kind.partition("*")
    forks, program = servers[framework], f"{framework}_kinds.py"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    common = (f"--kind={name}", f"--directory={tmp_path / 'checkpoints'}", f"--out={killed}")
    world = int(ranks or 1)
    all_end_well(start(forks, program, tmp_path, world, *common, "--bare", f"--out={whole}"), WAIT)
    deaths = [random.randrange(2, BATCHES + 1) for _ in range(2)]
    said = ""
    for death in deaths:
        started = start(forks, program, tmp_path, world, *common, f"--at={death}")
        assert started[0].wait(WAIT) in (0, -signal.SIGKILL), started[0].err()
        for each in started:
            each.kill()
        said += started[0].err()
    started = start(forks, program, tmp_path, world, *common)
    all_end_well(started, WAIT)
    said += started[0].err()
    lines = [line for line in said.splitlines() if line.startswith("robust-slurm: ")]
    key = (framework, name)
    known = WARNED.get(key) or SAID.get(key)
    unexpected = [line for line in lines if known is None or known not in line]
    assert not unexpected, f"killed in batches {deaths}"
    if key not in WARNED or not lines:  # never silent
        assert _read(killed) == _read(whole), f"killed in batches {deaths}"


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found
