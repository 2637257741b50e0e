"""Programs of the framework tests on this machine, killed at steps and started again."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt_jobs import _PROGRAM, PROGRAMS, Curve, read_lines, survivors
from torch_forks import Fork, TorchForks, all_end_well

from srun_wrapper.agent.processes.ports import free_port

WAIT = 100.0  # s of one start


@dataclass
class Run:
    """The outcome of a rank's training."""

    curve: Curve
    """The steps that count, each as it was done."""
    end: dict[str, Any]
    """The program's last line."""
    others: tuple[Run, ...] = ()
    """The outcomes of the other ranks."""


def _result(directory: Path, ranks: int) -> Run:
    first, *others = (_result_of(directory / f"rank-{rank}.jsonl") for rank in range(ranks))
    return replace(first, others=tuple(others))


def _result_of(journal: Path) -> Run:
    lines = read_lines(journal)
    end = {k: v for k, v in lines[-1].items() if k not in ("run", "epoch")}
    assert "end" in end, lines[-1]
    return Run(survivors(lines), end)


def _start(forks: TorchForks, words: Sequence[str], ranks: int, epoch: int = 0) -> list[Fork]:
    env = {"ROBUST_EPOCH": str(epoch)} if epoch else {}
    if ranks == 1:
        return [forks.start(_PROGRAM, *words, env=env)]
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    return [
        forks.start(_PROGRAM, *words, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]


def undisturbed(
    forks: TorchForks, program: str, directory: Path, steps: int, *options: str, ranks: int = 1
) -> Run:
    """One start, without our callback."""
    words = [str(PROGRAMS / program), f"--dir={directory}", f"--steps={steps}", "--pause=0"]
    all_end_well(_start(forks, [*words, "--bare", *options], ranks), WAIT)
    return _result(directory, ranks)


def run(
    forks: TorchForks, program: str, directory: Path, steps: int, kills: Sequence[int],
    *options: str, ranks: int = 1,
) -> Run:  # fmt: skip
    """A start for each kill, of one rank, and one more; every step goes to disk, none is lost but
    the killed."""
    words = [str(PROGRAMS / program), f"--dir={directory}", f"--steps={steps}", "--pause=0"]
    words += [f"--directory={directory / 'checkpoints'}", "--every=1", *options]
    victims = [random.randrange(ranks) for _ in kills]
    plan = ",".join(
        f"{epoch}:{step}:{rank}"
        for epoch, (step, rank) in enumerate(zip(kills, victims, strict=True), 1)
    )
    for epoch in range(1, len(kills) + 2):
        started = _start(forks, [*words, f"--kill={plan}"], ranks, epoch)
        if epoch <= len(kills):
            victim = started[victims[epoch - 1]]
            code = victim.wait(WAIT)
            assert code == -signal.SIGKILL, f"start {epoch}, kills {plan}: {victim.err()}"
            for other in started:
                other.kill()
        else:
            all_end_well(started, WAIT)
        said = "".join(each.err() for each in started)
        assert "Call save() last" not in said, said
    return _result(directory, ranks)
