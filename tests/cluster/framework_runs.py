"""Programs of the framework tests on this machine, killed at steps and started again."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_jobs import _PROGRAM, PROGRAMS, Curve, read_lines, survivors
from torch_forks import TorchForks

WAIT = 100.0  # s of one start


@dataclass
class Run:
    """The outcome of a training."""

    curve: Curve
    """The steps that count, each as it was done."""
    end: dict[str, Any]
    """The program's last line."""


def _result(directory: Path) -> Run:
    lines = read_lines(directory / "rank-0.jsonl")
    end = {k: v for k, v in lines[-1].items() if k not in ("run", "epoch")}
    assert "end" in end, lines[-1]
    return Run(survivors(lines), end)


def undisturbed(forks: TorchForks, program: str, directory: Path, steps: int, *options: str) -> Run:
    """One start, without our callback."""
    words = [str(PROGRAMS / program), f"--dir={directory}", f"--steps={steps}", "--pause=0"]
    fork = forks.start(_PROGRAM, *words, "--bare", *options)
    assert fork.wait(WAIT) == 0, fork.err()
    return _result(directory)


def run(
    forks: TorchForks, program: str, directory: Path, steps: int, kills: Sequence[int],
    *options: str,
) -> Run:  # fmt: skip
    """A start for each kill and one more; every step goes to disk, none is lost but the killed."""
    words = [str(PROGRAMS / program), f"--dir={directory}", f"--steps={steps}", "--pause=0"]
    words += [f"--directory={directory / 'checkpoints'}", "--every=1", *options]
    plan = ",".join(f"{epoch}:{step}:0" for epoch, step in enumerate(kills, 1))
    for epoch in range(1, len(kills) + 2):
        fork = forks.start(_PROGRAM, *words, f"--kill={plan}", env={"ROBUST_EPOCH": str(epoch)})
        code = fork.wait(WAIT)
        expected = -signal.SIGKILL if epoch <= len(kills) else 0
        assert code == expected, f"start {epoch}: {fork.err()}"
        assert "Call save() last" not in fork.err(), fork.err()
    return _result(directory)
