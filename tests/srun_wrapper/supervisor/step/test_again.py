"""Begin again after srun was killed: how often, with which words and environment."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from robust_slurm.config import Config
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.task_options import TaskOptions
from srun_wrapper.supervisor.life import Finishing
from srun_wrapper.supervisor.step import again


def test_it_begins_again_a_few_times_and_the_ranks_do_not_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _path, words, env: began.append((words, env)))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    env = {"A": "b"}
    for turn in range(again.MOST):
        again.note(env)
        assert again.left() == again.MOST - turn and again.TIMES not in env
        again.begin(["-n2", "python", "train.py"], env)
        words, env = began[-1]
        assert words[-4:] == ["srun_wrapper.cli", "-n2", "python", "train.py"]
        assert env["A"] == "b"
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_SETMASK, before)
    again.note(env)
    assert again.left() == 0
    again.note({})


def test_the_new_step_may_run_on_other_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    async def flush(_limit: float) -> None: ...

    none: Any = None
    state = JobState(Config(), 7, "n1")
    step, flushing = SimpleNamespace(killed=9), SimpleNamespace(flush=flush)
    finishing = Finishing(state, cast(Any, step), cast(Any, flushing), none, none, Phase())
    assert asyncio.run(finishing._begin_again()) == again.AGAIN
    said = capfd.readouterr().err
    assert "a new one starts in this allocation" in said and "same nodes" not in said


Change = Callable[[Any], object]


@pytest.mark.parametrize(
    ("change", "begins"),
    [
        (lambda _f: None, True),
        (lambda f: setattr(f.step, "killed", 0), False),  # Slurm has ended the step
        (lambda f: setattr(f._state, "signalled", 15), False),
        (lambda f: setattr(f._state, "ending", True), False),
        (lambda f: setattr(f, "_options", TaskOptions(inherit=True)), False),  # --pty
        (lambda f: setattr(f, "_options", TaskOptions(alone=True)), False),  # observe
        (lambda f: f._state.nodes.update(n=SimpleNamespace(stdin={0: True})), False),
    ],
)
def test_when_another_step_can_go_on(change: Change, begins: bool) -> None:
    step = SimpleNamespace(killed=9)
    none: Any = None
    state = JobState(Config(), 7, "n1")
    finishing = Finishing(state, cast(Any, step), none, none, none, Phase())
    change(finishing)
    assert finishing._may_begin_again() is begins
