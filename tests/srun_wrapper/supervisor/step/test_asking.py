"""The look for processes of the job's step on a node."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from srun_wrapper.supervisor.step.asking import NOT_THERE, ask_for_step

JOB, STEP = 987654321, "3"


@contextmanager
def process(title: str, env: dict[str, str]) -> Iterator[None]:
    """A process with this title; it has its own when the first line is read."""
    words = ["bash", "-c", 'exec -a "$0" sh -c "echo; read x"', title]
    with subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdin and started.stdout and started.stdout.readline()
        try:
            yield
        finally:
            started.stdin.close()


@pytest.mark.parametrize(
    ("title", "env", "code"),
    [
        ("python", {"SLURM_JOB_ID": str(JOB), "SLURM_STEP_ID": STEP}, 0),
        (f"slurmstepd: [{JOB}.{STEP}]", {}, 0),  # it may import a container's image
        (f"slurmstepd: [{JOB}.1{STEP}]", {}, NOT_THERE),
        (f"slurmstepd: [{JOB}.extern]", {}, NOT_THERE),
        ("python", {"SLURM_JOB_ID": str(JOB), "SLURM_STEP_ID": "4"}, NOT_THERE),
    ],
)
def test_what_shows_that_the_step_is_on_the_node(
    title: str, env: dict[str, str], code: int
) -> None:
    argv = ask_for_step(["n1"], JOB, STEP)
    with process(title, env):
        found = subprocess.run(argv[argv.index("sh") :], check=False)
    assert found.returncode == code
