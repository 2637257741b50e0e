"""Kinds of jobs and steps: what is taken, what is refused with one line, what is warned of."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from robust_slurm.config import Config, flags
from srun_wrapper.code.cli import main as update
from srun_wrapper.command.handover import own_environment
from srun_wrapper.command.in_force import in_force
from srun_wrapper.command.kinds import accepted, mpi_world, requeue_signals, warning
from srun_wrapper.command.srun_options import SrunCommand, UsageError, split
from srun_wrapper.command.step_request import effective
from status.cli import main as status

USR1, USR2, TERM = (int(n) for n in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM))


def command(*words: str) -> SrunCommand:
    return split([*words, "python", "train.py"], flags())


def take(*words: str, env: dict[str, str], **settings: Any) -> list[str]:
    given = command(*words)
    return accepted(given, effective(given, env), Config(**settings), env).argv()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", set()),
        ("USR2", {USR2}),
        ("sigusr1", {USR1}),
        ("USR1,USR2, TERM", {USR1, USR2, TERM}),
        ("USR2 TERM", {USR2, TERM}),
    ],
)
def test_signals_of_a_requeue(text: str, found: set[int]) -> None:
    assert requeue_signals(text) == found


@pytest.mark.parametrize("text", ["KILL", "USR3", "12", "INT", "USR2;TERM", "USR2,HUP"])
def test_other_signals_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"--robust-requeue-on=.*none of USR1, USR2, TERM") as got:
        take(env={}, requeue_on=text)
    assert "\n" not in str(got.value)


@pytest.mark.parametrize("words", [["-Ma"], ["-M", "a"], ["--clusters=a"], ["--cluster", "a"]])
def test_the_jobs_own_cluster_says_nothing(words: list[str]) -> None:
    assert take(*words, "-n2", env={"SLURM_CLUSTER_NAME": "a"}) == ["-n2"]


@pytest.mark.parametrize("words", [["--bcast=/tmp/prog"], ["--bcast"]])
def test_a_copy_of_the_program_is_refused_in_one_line(words: list[str]) -> None:
    with pytest.raises(
        UsageError, match=r"^--bcast is not supported: .*: leave --bcast out"
    ) as got:
        take(*words, env={})
    assert "\n" not in str(got.value)


@pytest.mark.parametrize("name", ["b", "a,b", "all", "A"])
@pytest.mark.parametrize("env", [{}, {"SLURM_CLUSTER_NAME": "a"}], ids=["unknown", "a"])
def test_another_cluster_is_refused_in_one_line(name: str, env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=rf"^--clusters={name}: a step runs on the") as got:
        take(f"--clusters={name}", env=env)
    assert "\n" not in str(got.value) and f"sbatch --clusters={name}" in str(got.value)


def test_the_environment_chooses_no_cluster_for_the_step() -> None:
    assert own_environment({"SLURM_CLUSTERS": "a,b", "SLURM_JOB_ID": "1"}) == {"SLURM_JOB_ID": "1"}


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ([], ""),
        (["--mpi=none"], ""),
        (["--mpi=openmpi"], ""),
        (["--mpi=pmi2"], "pmi2"),
        (["--mpi", "pmix_v4"], "pmix_v4"),
        (["--mpi=pmi2", "--mpi=none"], ""),
    ],
)
def test_an_mpi_world(words: list[str], world: str) -> None:
    given = command(*words)
    assert mpi_world(given) == world
    told = warning(given, Config(max_restarts=2), {})
    assert bool(told) == bool(world) and "\n" not in told
    if world:
        assert f"--mpi={world} " in told and "until it has started 3 times" in told
        assert "the job ends (requeue = never)" in warning(given, Config(requeue="never"), {})
        assert warning(given, in_force(Config(mode="observe"), given), {}) == ""
    kept = in_force(Config(slow="replace"), given)
    assert (kept.warm, kept.slow) == ((False, "warn") if world else (True, "replace"))


def test_spares_under_a_modules_variable_are_kept_and_named() -> None:
    """The variable says not that the program uses MPI: torch's jobs keep spares and restarts."""
    env, spare = {"SLURM_MPI_TYPE": "pmix"}, Config(spares=1)
    assert in_force(spare, command()).warm
    told = warning(command(), spare, env)
    assert "SLURM_MPI_TYPE=pmix is set" in told and "--mpi=none" in told and "\n" not in told
    assert warning(command("--mpi=none"), spare, env) == ""
    assert warning(command(), Config(), env) == ""
    assert warning(command(), spare, {"SLURM_MPI_TYPE": "none"}) == ""
    assert warning(command(), spare, {}) == ""


@pytest.mark.parametrize("settings", [{"spares": 1}, {"replay": 10}, {"code": "src"}])
def test_what_starts_ranks_again_is_refused_in_an_mpi_world(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(UsageError, match=f"--robust-{name.replace('_', '-')}, or --mpi") as got:
        in_force(Config(**settings), command("--mpi=pmi2"))
    assert "\n" not in str(got.value)
    in_force(Config(**settings, mode="observe"), command("--mpi=pmi2"))
    in_force(Config(**settings), command())


@pytest.mark.parametrize("words", [["7", "-Mb"], ["--clusters=b"]])
@pytest.mark.parametrize("tool", ["robust-status", "robust-update"])
def test_tools_show_and_change_one_cluster(
    words: list[str], tool: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = status(words) if tool == "robust-status" else update(["7", words[-1]])
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == 1 and said.startswith(f"{tool}: -M: "), said
