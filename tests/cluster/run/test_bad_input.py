"""Messages and exit codes of robust-srun when it cannot even begin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import prepared

from lab import Cluster

INSIDE = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_NNODES": "2"}


@pytest.fixture(scope="module")
def here() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0) as cluster:
        yield cluster


def said(
    lab: Cluster, words: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """stderr of a robust-srun that must fail with exit code 2, without a traceback."""
    argv = ["robust-srun", *words.split()]
    done = lab.exec("head", argv, env=env, cwd=cwd, timeout=30)
    assert done.returncode == 2, done
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert re.fullmatch(r"(robust-srun: .*\n)+", done.stderr), done.stderr
    return done.stderr


def test_no_allocation(here: Cluster) -> None:
    assert "no allocation" in said(here, "-n2 hostname")
    assert "sbatch" in said(here, "hostname")


def test_unknown_own_option(here: Cluster) -> None:
    text = said(here, "--robust-spars=1 hostname", env=INSIDE)
    assert "--robust-spars" in text and "--robust-spares" in text  # what was probably meant


def test_unknown_srun_option(here: Cluster) -> None:
    argv = ["--no-such-option", "hostname"]
    plain, robust = (here.exec("head", [t, *argv], env=INSIDE) for t in ("srun", "robust-srun"))
    assert robust.returncode == plain.returncode == 255
    assert plain.stderr.splitlines()[0] in robust.stderr and "Traceback" not in robust.stderr


@pytest.mark.parametrize("spares", ["2", "3"])
def test_no_node_left_beside_the_spares(here: Cluster, spares: str) -> None:
    text = said(here, f"--robust-spares={spares} hostname", env=INSIDE)
    assert "2 nodes" in text and "at most 1 spare" in text


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--robust-spares=-1", "at least 0"),
        ("--robust-spares=many", "'many'"),
        ("--robust-requeue=later", "auto, never"),
        ("--robust-hang-floor=0", "at least 0.1"),
        ("--robust-progress-regex=(", "--robust-progress-regex"),
    ],
)
def test_bad_value(here: Cluster, option: str, named: str) -> None:
    assert named in said(here, f"{option} hostname", env=INSIDE)


@pytest.mark.parametrize(
    ("text", "named"),
    [("spares = ", "cannot be read"), ("sparse = 1", "spares"), ("spares = 'two'", "'two'")],
)
def test_bad_settings_file(here: Cluster, text: str, named: str) -> None:
    training = prepared(here, 2)
    (training.dir / "robust.toml").write_text(text)
    message = said(here, "hostname", cwd=training.dir, env=INSIDE)
    assert "robust.toml" in message and named in message
    message = said(here, f"--robust-config={training.dir}/robust.toml hostname", env=INSIDE)
    assert "robust.toml" in message and named in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, "No such file"),
        ("[[signature]]\nid = 'a'\n", "signature 'a': pattern must be a text"),
    ],
)
def test_bad_signatures_file(here: Cluster, text: str | None, named: str) -> None:
    site = prepared(here, 2).dir / "site.toml"
    if text is not None:
        site.write_text(text)
    message = said(here, f"--robust-signatures-file={site} hostname", env=INSIDE)
    assert f"signatures_file: {site}: " in message and named in message


def test_settings_file_that_is_missing(here: Cluster) -> None:
    assert "/nowhere.toml" in said(here, "--robust-config=/nowhere.toml hostname", env=INSIDE)


def test_no_command(here: Cluster) -> None:
    assert "command" in said(here, "-n2", env=INSIDE)


def test_a_state_directory_that_cannot_be_written_costs_only_the_records(here: Cluster) -> None:
    training = prepared(here, 2)
    training.submit(training.line(["--robust-state-dir=/nowhere"], []), ["-N2"])
    assert training.wait_end() == 0
    assert "warning: cannot write /nowhere" in training.out()
    assert "without records" in training.out()


def test_help_needs_no_allocation(here: Cluster) -> None:
    done = here.exec("head", ["robust-srun", "--robust-help"])
    assert done.returncode == 0 and done.stderr == ""
    assert "--robust-spares" in done.stdout and "Exit codes:" in done.stdout
