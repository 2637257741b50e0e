"""The srun lines of a --robust job: those that are robust-srun's, and those that go back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from robust_slurm import commands
from robust_slurm.config import Config, flags, load
from srun_wrapper.command.handover import (
    BY_PLUGIN,
    OPTION,
    handed,
    own_environment,
    why_plain,
)
from srun_wrapper.command.in_force import in_force
from srun_wrapper.command.srun_options import split
from srun_wrapper.command.step_request import effective
from srun_wrapper.command.steps import main_argv

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "32"}


def plain(words: Sequence[str], env: Mapping[str, str], spares: int = 0) -> str | None:
    command = split(words, flags())
    return why_plain(command, effective(command, env), env, spares)


def agree(found: str | None, why: str | None) -> None:
    """``why``: how the reason begins."""
    assert found == why or (why and found is not None and found.startswith(why))


@pytest.mark.parametrize(
    ("words", "spares", "why"),
    [
        ((), 0, None),
        (("-N4", "-n32", "--mpi=none"), 0, None),
        (("-N4-8",), 0, None),
        (("--jobid=7",), 0, None),
        (("-N3",), 1, None),
        (("--pty",), 0, ""),
        (("--interactive", "--preserve-env"), 0, ""),
        (("--overlap",), 0, "--overlap: it shares its nodes with another step"),
        (("--overlap=force",), 0, "--overlap: it shares its nodes with another step"),
        (("--multi-prog",), 0, "--multi-prog: its tasks are several programs"),
        (("--het-group=1",), 0, "--het-group: it is a part of a heterogeneous job"),
        (("--pack-group=1",), 0, "--het-group: it is a part of a heterogeneous job"),
        (("-Ma",), 0, "--clusters: it names a cluster"),
        (("-Z",), 0, "--no-allocate: it has no allocation"),
        (("--bcast=/tmp/x",), 0, "--bcast: srun copies its program to the nodes"),
        (("--mpi=pmi2",), 0, "--mpi=pmi2: its ranks are one MPI world, which cannot be started "),
        (("--mpi", "pmix_v4"), 0, "--mpi=pmix_v4: its ranks are one MPI world, which cannot "),
        (("--async",), 0, "--async: srun does not wait for it"),
        (("--site-option",), 0, "--site-option: an option that robust-srun does not know, so "),
        (("--site-option", "-N4"), 0, None),
        (("--site-option=a b",), 0, None),
        (("--jobid=8",), 0, "--jobid=8: it is a step of another job"),
        (("-N3",), 0, "it uses 3 of the job's 4 nodes; if the others are spares, set "),
        (("-n1",), 0, "it uses 1 of the job's 4 nodes; if the others are spares, set "),
        (("-N2",), 1, "it uses 2 of the job's 4 nodes; if the others are spares, set "),
    ],
)
def test_why_plain(words: tuple[str, ...], spares: int, why: str | None) -> None:
    agree(plain([*words, "python", "train.py"], JOB, spares), why)


@pytest.mark.parametrize(
    ("words", "name", "value", "why"),
    [
        ((), "SLURM_OVERLAP", "1", "SLURM_OVERLAP is set: it shares its nodes with another step"),
        ((), "SLURM_BCAST", "", "SLURM_BCAST is set: srun copies its program to the nodes"),
        ((), "SLURM_MPI_TYPE", "pmix", "SLURM_MPI_TYPE=pmix: its ranks are one MPI world, which "),
        ((), "SLURM_MPI_TYPE", "none", None),
        (("--mpi=none",), "SLURM_MPI_TYPE", "pmix", None),
        ((), "SLURM_SRUN_MULTI", "1", "--multi-prog: its tasks are several programs"),
    ],
)
def test_an_option_in_the_environment(
    words: tuple[str, ...], name: str, value: str, why: str | None
) -> None:
    agree(plain([*words, "python", "train.py"], {**JOB, name: value}), why)


@pytest.mark.parametrize("program", ["orted", "/opt/ompi/bin/prted", "hydra_bstrap_proxy"])
def test_mpiruns_own_daemons_are_no_training(program: str) -> None:
    """mpirun calls srun, with --mpi=none and all nodes of the job."""
    words = ["--ntasks-per-node=1", "--kill-on-bad-exit", "--mpi=none", "-N4", "-n4", program, "-x"]
    found = plain(words, JOB)
    assert found is not None and found.endswith("mpirun starts its ranks below it")


def test_the_mode_is_never_the_next_word_nor_the_commands() -> None:
    for words, mode in (
        (["--robust", "full"], "full"),
        (["--robust=observe", "x"], "observe"),
        (["-N2", "--robust=off", "x"], "off"),
        (["--robust=off", "--robust", "x"], "full"),
        (["--rob", "x"], "full"),  # srun takes an abbreviation for it
        (["--ro=observe", "x"], "observe"),
    ):
        command = split(words, flags())
        assert command.robust == {"robust-mode": mode} and len(command.command) == 1
    command = split(["x", "--robust=off"], flags())
    assert command.robust == {} and command.command == ("x", "--robust=off")


def test_srun_that_we_start_is_left_alone() -> None:
    started = {OPTION: "full", BY_PLUGIN: "full:/opt/slurm/bin/srun", "PATH": "/nowhere"}
    env = own_environment(started)
    assert env == {
        OPTION: "off",
        "PATH": "/nowhere:/opt/slurm/bin",
        "ROBUST_EARLY_RESTART": "0",
    }
    assert own_environment({**started, "ROBUST_EARLY_RESTART": "1"})["ROBUST_EARLY_RESTART"] == "1"
    assert own_environment({"A": "b"}) == {"A": "b"}, "without the plugin nothing is added"


@pytest.mark.parametrize("text", ["", "back:7", "off:/bin/srun", ":/bin/srun", "$(x)"])
def test_what_is_not_the_plugins(text: str) -> None:
    assert handed({BY_PLUGIN: text}) is None


@pytest.mark.parametrize(
    ("words", "env", "got"),
    [
        (["--pty", "sh"], {BY_PLUGIN: "full:"}, "--pty sh|back:|full"),
        (["a", ":", "b"], {BY_PLUGIN: "full:"}, "a : b|back:|full"),
        (["--robust=off", "x", "--robust"], {BY_PLUGIN: "full:"}, "x --robust|back:|full"),
        (["--robust=off", "x"], {}, "x||off"),
        (["-n4x", "x"], {BY_PLUGIN: "full:"}, "-n4x x|back:|full"),  # srun's own error
        (["x"], {BY_PLUGIN: "full:", "SLURM_JOB_NUM_NODES": ""}, "x|back:|full"),
        (
            ["--exclude=n1", "-wn2", "x"],
            {BY_PLUGIN: "full:", "ROBUST_SPARES": "1"},
            "--exclude=n1 -wn2 x|back:|full",
        ),
        (["--help"], {BY_PLUGIN: "observe:"}, "--help|back:|full"),
    ],
)
def test_back_to_srun(tmp_path: Path, words: list[str], env: dict[str, str], got: str) -> None:
    """In the same process, with the words of the user, and so that the plugin sees that."""
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\necho "$*|${{{BY_PLUGIN}%$$}}|${OPTION}"\n')
    srun.chmod(0o755)
    base = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), OPTION: "full", **JOB}
    done = subprocess.run(
        [sys.executable, *commands.words("srun_wrapper.cli"), *words],
        env=base | env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, f"{got}\n"), done.stderr


def test_a_closed_stdout_does_not_change_the_exit_code(tmp_path: Path) -> None:
    words = [sys.executable, *commands.words("srun_wrapper.cli"), "true"]
    shell = ["sh", "-c", 'exec "$@" >&-', "-", *words]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        shell, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=30
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr


def test_observe_mode_has_nothing_to_act_with(tmp_path: Path) -> None:
    named = {"robust-mode": "observe", "robust-spares": "2", "robust-slow": "replace"}
    named["robust-code"] = str(tmp_path)
    config = in_force(load(dict(named), {}, tmp_path, tmp_path / "none"))
    assert not (config.spares or config.standby_partition or config.stop_tests or config.replay)
    assert not (config.checkpoint or config.warm or config.code)
    assert (config.requeue, config.drain, config.slow) == ("never", "never", "warn")
    assert in_force(Config()) == Config()


def test_observe_mode_leaves_the_end_of_the_step_to_srun() -> None:
    command = split(["-K1", "python"], flags())
    assert main_argv(command, {}, observe=True) == ["srun", "-K1", "--job-name=python"]
    assert os.environ.get(BY_PLUGIN) is None


def test_a_job_without_path(tmp_path: Path) -> None:
    """The environment of ``sbatch --export=NONE`` has none; the srun that was called is known."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "got $*"\n')
    srun.chmod(0o755)
    done = subprocess.run(
        [sys.executable, *commands.words("srun_wrapper.cli"), "--pty", "sh"],
        env={**JOB, "HOME": str(tmp_path), BY_PLUGIN: f"full:{srun}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "got --pty sh\n"), done.stderr
