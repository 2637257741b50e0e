"""The plugin's decisions, in a stand-in for the programs of Slurm that load it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from places import REPOSITORY

from health.admin import plugin

HEADERS = Path("/usr/include/slurm/spank.h").exists() and shutil.which("cc") is not None
pytestmark = pytest.mark.skipif(not HEADERS, reason="libslurm-dev and a C compiler are needed")

INHERITED = "SLURM_SPANK__SLURM_SPANK_OPTION_robust_robust"
JOB = {"SLURM_JOB_ID": "7", "A": "b"}
PLAIN = "srun registered=1 told=no inherited=no step=no\n"


class Host:
    """Runs the stand-in; what the plugin execs prints its words, mark and blocked signals."""

    def __init__(self, top: Path) -> None:
        self.program, self.object, self.target = (
            top / n for n in ("host", "robust.so", "robust-srun")
        )
        source = REPOSITORY / "tests" / "programs" / "spank_host.c"
        build = ["cc", "-rdynamic", "-include", "stdarg.h", "-o", str(self.program), str(source)]
        subprocess.run([*build, "-ldl"], check=True, timeout=60)
        self.object.write_bytes(plugin.compiled().encode("utf-8", "surrogateescape"))
        self.target.write_text(
            "#!/bin/bash\nprintf 'exec'; for word; do printf ' [%s]' \"$word\"; done\n"
            'echo " by=$ROBUST_BY_PLUGIN A=$A"; grep SigBlk /proc/self/status\n'
        )
        self.target.chmod(0o755)

    def __call__(
        self,
        context: str,
        value: str,
        *words: str,
        env: Mapping[str, str] = JOB,
        target: str = "",
        python: str = "",
    ) -> subprocess.CompletedProcess[str]:
        named = f"robust_srun={target or self.target}"
        argv = [str(self.program), str(self.object), context, value, named, *words]
        argv[5:5] = [f"python={python}"] if python else []
        return subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=20)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("spank"))


@pytest.mark.parametrize(
    ("value", "mode"),
    [("null", "full"), ("(null)", "full"), ("full", "full"), ("observe", "observe")],
)
def test_an_srun_of_a_job_becomes_robust_srun(host: Host, value: str, mode: str) -> None:
    """With its own words and environment, and without the signals that srun has blocked."""
    done = host("local", value, "two words", "", "$(x)", env={**JOB, "ROBUST_BY_PLUGIN": "old:/x"})
    line, mask = done.stdout.splitlines()
    assert line.startswith("exec ") and line.endswith(
        f" [two words] [] [$(x)] by={mode}:{host.program} A=b"
    )
    assert mask.split()[1] == "0000000000400000", "SIGURG was the caller's"


def test_the_jobs_python_is_not_robust_sruns(host: Host, tmp_path: Path) -> None:
    """A job whose Python has a home and packages of its own; they reach the ranks."""
    target = tmp_path / "robust-srun"
    (tmp_path / "json.py").write_text("raise SystemExit('of the job')\n")
    target.write_text(
        "import json, os, sys\nprint(sys.argv[3:], os.environ['PYTHONHOME'], sys.flags.isolated)\n"
    )
    env = {**JOB, "PYTHONHOME": "/nowhere", "PYTHONPATH": str(tmp_path)}
    named = {"target": str(target), "python": sys.executable}
    assert host("local", "full", "a b", env=env, **named).stdout == PLAIN, "it cannot be run"
    target.chmod(0o755)
    done = host("local", "full", "a b", env=env, **named)
    assert done.stdout.endswith(", 'a b'] /nowhere 1\n"), done.stderr
    done = host("local", "full", env=env, target=str(target), python="/nowhere/python")
    assert done.stdout == PLAIN and "/nowhere/python: No such file" in done.stderr


def test_it_compiles_without_a_warning(tmp_path: Path) -> None:
    source = str(REPOSITORY / "templates" / "spank_robust.c")
    strict = ["-std=gnu99", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror"]
    build = ["cc", *strict, "-fPIC", "-shared", "-o", str(tmp_path / "robust.so"), source]
    subprocess.run(build, check=True, timeout=60)


@pytest.mark.parametrize("context", ["remote", "slurmd", "job_script"])
def test_where_root_runs_it_does_nothing(host: Host, context: str) -> None:
    env = {**JOB, INHERITED: "full", "ROBUST_BY_PLUGIN": "full:/bin/sh"}
    done = host(context, "full", env=env)
    assert done.stdout == "srun registered=0 told=yes inherited=yes step=no\n" and not done.stderr


@pytest.mark.parametrize(
    ("context", "value", "env"),
    [
        ("local", "-", JOB),
        ("local", "off", JOB),
        ("local", "full", {**JOB, "ROBUST_STEP_KEY": "x"}),  # a wrapper around srun adds --robust
        ("local", "full", {**JOB, "SLURM_STEP_ID": "0"}),
        ("local", "full", {**JOB, "SLURM_STEP_ID": "12"}),
        ("allocator", "full", JOB),
        ("allocator", "full", {**JOB, INHERITED: "full"}),
        ("allocator", "-", {**JOB, INHERITED: "full", "ROBUST_BY_PLUGIN": "full:/bin/sh"}),
    ],
)
def test_a_plain_srun(host: Host, context: str, value: str, env: dict[str, str]) -> None:
    done = host(context, value, env=env)
    step = "SLURM_STEP_ID" in env
    plain = PLAIN.replace("step=no", "step=yes") if step else PLAIN
    assert (done.returncode, done.stdout, done.stderr) == (0, plain, "")


@pytest.mark.parametrize(("value", "kept"), [("full", "no"), ("observe", "no"), ("-", "yes")])
def test_a_job_that_is_submitted_in_a_step_is_in_no_step(host: Host, value: str, kept: str) -> None:
    """The job's environment is that of the shell in which sbatch was called, as any job's is."""
    done = host("allocator", value, env={"SLURM_STEP_ID": "0"})
    assert done.stdout == PLAIN.replace("step=no", f"step={kept}")


def test_the_shell_of_salloc_is_no_step(host: Host) -> None:
    assert host("local", "full", env={**JOB, "SLURM_STEP_ID": "4294967290"}).stdout.startswith(
        "exec"
    )


def test_a_line_that_robust_srun_gives_back_stays_back_once(host: Host) -> None:
    """The mark holds for the one process that has its number."""
    words = f"{host.program} {host.object} local full robust_srun={host.target}"
    shell = f"ROBUST_BY_PLUGIN=back:$$ exec {words}"
    done = subprocess.run(["sh", "-c", shell], env=JOB, capture_output=True, text=True, timeout=20)
    assert done.stdout == PLAIN
    assert host("local", "full", env={**JOB, "ROBUST_BY_PLUGIN": "back:1"}).stdout.startswith(
        "exec"
    )


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "/nowhere/robust-srun",
            "/nowhere/robust-srun: No such file or directory; plain srun goes on",
        ),
        ("/etc/passwd", "/etc/passwd: Permission denied; plain srun goes on"),
        ("robust-srun", "plugstack.conf names no robust_srun=/path; plain srun goes on"),
    ],
)
def test_a_broken_installation_leaves_a_plain_srun(host: Host, target: str, says: str) -> None:
    done = host("local", "full", target=target)
    assert (done.returncode, done.stdout) == (0, PLAIN) and says in done.stderr
    assert not host("local", "-", target=target).stderr, "a plain job does not hear of it"


def test_without_a_job_one_line_tells_what_is_needed(host: Host) -> None:
    done = host("local", "full", env={})
    assert done.stdout == PLAIN and "--robust needs a job" in done.stderr
    silent = host("local", "full", env={INHERITED: "full"})
    assert not silent.stderr, "a standby node is requested like that from within a job"


def test_a_value_that_is_none_is_refused(host: Host) -> None:
    done = host("local", "x" * 99)
    assert done.returncode == 7 and f"--robust={'x' * 40}: use off, observe or full" in done.stderr


def test_a_large_environment_is_passed_on_whole(host: Host) -> None:
    large = {f"V{n}": "x" * 100_000 for n in range(12)}
    done = host("local", "full", *["w" * 1000] * 500, env={**JOB, **large, "Z": "end"})
    assert done.stdout.count("[www") == 500 and "A=b" in done.stdout, done.stderr
    assert os.environ.get("ROBUST_BY_PLUGIN") is None


# ---- the real programs, which load plugins before they need a controller


@pytest.mark.skipif(shutil.which("srun") is None, reason="Slurm's commands are needed")
@pytest.mark.parametrize("program", ["srun", "sbatch", "salloc"])
@pytest.mark.parametrize("state", ["intact", "damaged", "older release", "missing", "no list"])
def test_slurms_own_programs(host: Host, tmp_path: Path, program: str, state: str) -> None:
    """Slurm's programs work in every state of the plugin; if it is intact, they know the option."""
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1\n"
        "AuthType=auth/none\nCredType=cred/none\n"
    )
    (tmp_path / plugin.STACK).write_text(f"include {tmp_path}/ours.conf\n")
    own = tmp_path / plugin.OBJECT
    if state != "no list":
        (tmp_path / "ours.conf").write_text(f"optional {own} robust_srun={host.target}\n")
    raw = host.object.read_bytes()
    number = re.search(rb"robust-built-for:0x([0-9a-f]+):", raw)
    assert number is not None
    version = int(number[1], 16).to_bytes(4, "little")
    older = raw.replace(version, bytes([*version[:2], 15, 0]))
    found = {"intact": raw, "damaged": b"no object", "older release": older}.get(state)
    if found is not None:
        own.write_bytes(found)
    env = {**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    done = subprocess.run([program, "--help"], env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert ("--robust=off|observe|full" in done.stdout) is (state == "intact")
    assert bool(done.stderr) is (state not in ("intact", "no list"))
