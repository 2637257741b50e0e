"""srun's command lines for the job's own step and for standby nodes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from robust_slurm import commands
from robust_slurm.config import flags
from robust_slurm.slurm import Job
from srun_wrapper.command.layout import StepPlan
from srun_wrapper.command.srun_options import SrunCommand, split
from srun_wrapper.command.steps import Launch, Secrets, main_argv, standby_argv, start, task_argv
from srun_wrapper.protocol.task_options import TaskOptions

SECRETS = Secrets(b"\xab" * 32, 4711)
OURS = "ROBUST_STEP_KEY,ROBUST_PORT,ROBUST_STANDBY_REQUEST"


def command(*words: str) -> SrunCommand:
    return split([*words, "python", "train.py"], flags())


def job(**changes: Any) -> Job:
    values: dict[str, Any] = {
        "id": 12,
        "tres_per_node": "gpu:h100:4",
        "account": "ai",
        "qos": "N/A",
        "cpus_per_task": 1,
    }
    return cast(Job, SimpleNamespace(**(values | changes)))


def launch(*words: str, env: dict[str, str] | None = None) -> Launch:
    out = ("--output=log", "--open-mode=append")
    return Launch(command(*words), StepPlan(), TaskOptions(), env or {}, out)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["--job-name=python"]),
        (("-N4", "-n", "8"), ["-N4", "-n", "8", "--job-name=python"]),
        (("-K1", "-k"), ["--job-name=python"]),
        (("--no-kill=off",), ["--job-name=python"]),
        (("-J", "mine"), ["-J", "mine"]),
    ],
)
def test_main_argv(words: tuple[str, ...], expected: list[str]) -> None:
    argv = main_argv(command(*words), {})
    assert argv == ["srun", *expected, "--no-kill", "--kill-on-bad-exit=0"]


@pytest.mark.parametrize(
    ("words", "env", "export"),
    [
        ((), {}, None),
        (("--export=ALL",), {}, "--export=ALL"),
        (("--export=ALL,A=1",), {}, "--export=ALL,A=1"),
        (("--export=NONE",), {}, f"--export={OURS}"),
        (("--export=A,B=2",), {}, f"--export=A,B=2,{OURS}"),
        # What sbatch --export=NONE leaves in the job's environment.
        ((), {"SLURM_EXPORT_ENV": "NONE"}, f"--export={OURS}"),
        ((), {"SRUN_EXPORT_ENV": "A", "SLURM_EXPORT_ENV": "NONE"}, f"--export=A,{OURS}"),
        ((), {"SLURM_EXPORT_ENV": "ALL"}, None),
        (("--export=ALL",), {"SLURM_EXPORT_ENV": "NONE"}, "--export=ALL"),
    ],
)
def test_our_variables_always_reach_the_shim(
    words: tuple[str, ...], env: dict[str, str], export: str | None
) -> None:
    for argv in (
        main_argv(command(*words), env),
        standby_argv(launch(*words, env=env), job(), "standby", 2, (), 60),
    ):
        found = [word for word in argv if word.startswith("--export")]
        assert found == ([export] if export else [])


def test_standby_argv() -> None:
    words = ("-N4", "-n8", "--cpus-per-task=3", "--output=log", "-w", "n[1-4]", "--label")
    argv = standby_argv(launch(*words), job(), "standby", 2, ("n3", "n9"), 90)
    assert argv[0] == "srun"
    assert {"--partition=standby", "--nodes=1", "--ntasks=2", "--time=90"} <= set(argv)
    assert {"--exclude=n3,n9", "--gres=gpu:h100:4", "--account=ai", "--no-kill"} <= set(argv)
    assert {"--cpus-per-task=3", "--output=log", "--open-mode=append"} <= set(argv)
    # Nothing of how many and where comes from the job's own step.
    assert not {"-N4", "-n8", "-w", "n[1-4]", "--label", "--qos=N/A"} & set(argv)


def test_standby_argv_without_extras() -> None:
    plain = job(tres_per_node=None, account=None, qos=None)
    argv = standby_argv(launch(), plain, "standby", 1, (), 1)
    assert not [w for w in argv if w.startswith(("--gres", "--account", "--qos", "--exclude"))]


@pytest.mark.parametrize(
    ("words", "env", "fields", "has", "has_not"),
    [
        ((), {}, {"cpus_per_task": 4}, "--cpus-per-task=4", "--cpus-per-task=1"),
        (("-c2",), {}, {"cpus_per_task": 4}, "-c2", "--cpus-per-task=4"),
        ((), {"SLURM_GPUS_ON_NODE": "8"}, {"tres_per_node": None}, "--gres=gpu:8", "--gres="),
        ((), {"SLURM_GPUS_ON_NODE": "8"}, {}, "--gres=gpu:h100:4", "--gres=gpu:8"),
    ],
)
def test_a_standby_node_has_what_a_node_of_the_job_has(
    words: tuple[str, ...], env: dict[str, str], fields: dict[str, Any], has: str, has_not: str
) -> None:
    argv = standby_argv(launch(*words, env=env), job(**fields), "standby", 1, (), 1)
    assert has in argv and has_not not in argv


def test_the_key_travels_by_environment_only() -> None:
    words = [
        *main_argv(command(), {}),
        *task_argv("", TaskOptions(records="/s/jobs/7"), ("python", "train.py")),
        *standby_argv(launch(), job(), "standby", 1, (), 1),
    ]
    assert SECRETS.key.hex() not in " ".join(words)
    assert SECRETS.env(3) == {
        "ROBUST_STEP_KEY": "ab" * 32,
        "ROBUST_PORT": "4711",
        "ROBUST_STANDBY_REQUEST": "3",
    }


def test_task_argv() -> None:
    argv = task_argv("", TaskOptions(regex="a b"), ("python", "-c", "x y"))
    assert argv[:4] == [sys.executable, "-I", commands.__file__, "srun_wrapper.agent.task"]
    assert argv[5:] == ["--", "python", "-c", "x y"]
    other = task_argv("/opt/py", TaskOptions(), ("a",))
    assert other[:4] == ["/opt/py", "-I", "-m", "robust_slurm.commands"], "its own installation"


def test_start_runs_with_the_given_environment() -> None:
    async def check() -> int:
        words = ["/bin/sh", "-c", 'test "$A" = 1 && test -z "$HOME"']
        return await (await start(words, {"A": "1"}, own_session=True)).wait()

    assert asyncio.run(check()) == 0


def test_srun_ends_with_its_parent(tmp_path: Path) -> None:
    """The kernel tells srun when robust-srun dies, however it dies."""
    code = (
        "import asyncio, os, sys\n"
        "from srun_wrapper.command.steps import start\n"
        "async def go():\n"
        "    p = await start(['sh', '-c', 'trap \"echo told; exit\" TERM; echo ready; > \"$0\";'\n"
        "                     ' while :; do sleep 0.05; done', sys.argv[1]], os.environ,\n"
        "                    own_session=True)\n"
        "    while not os.path.exists(sys.argv[1]):\n"
        "        await asyncio.sleep(0.01)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(go())\n"
    )

    async def check() -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            code,
            str(tmp_path / "ready"),
            stdout=asyncio.subprocess.PIPE,
            env=dict(os.environ),
        )
        out, _ = await asyncio.wait_for(process.communicate(), 20.0)
        return out

    assert asyncio.run(check()).split() == [b"ready", b"told"]
