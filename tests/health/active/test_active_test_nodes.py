"""robust-health test --nodes: the nodes of a job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fake_active_test
import health_site
import pytest

from health.active import cli as active_cli
from health.active.coordinator import runs, start
from health.active.judging import tables

site, python, run = health_site.site, fake_active_test.python, fake_active_test.run


# An srun for one machine: a process for each node, as its environment would be, and one that says
# what srun says of n4, whose task cannot be started.
SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
words = [w for w in sys.argv[1:] if not w.startswith("--")]
nodes = next(w for w in sys.argv if w.startswith("--nodelist=")).partition("=")[2].split(",")
assert not any(os.environ["ROBUST_TEST_KEY"] in w for w in sys.argv)
tasks = []
for at, node in enumerate(nodes):
    if node == "n4":
        print("slurmstepd: error: execve(): no such file", flush=True)
        print("srun: error: n4: task 3: Exited with exit code 2", flush=True)
        continue
    env = os.environ | {"SLURMD_NODENAME": node, "SLURM_LOCALID": "0"}
    env["SLURM_LAUNCH_NODE_IPADDR"] = "127.0.0.1"
    tasks.append(subprocess.Popen(words, env=env))
for task in tasks:
    task.wait()
"""


def test_the_nodes_of_a_job(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-6]")
    monkeypatch.setenv("FAKE_WORKER", "wrong")
    monkeypatch.setattr(runs, "_leaves", dict)
    assert run(python, "--nodes", "all", "--json", "gemm", "pair") == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(found["named"]) == {"n1", "n2"} and found["cleared"] == ["n3", "n5", "n6"]
    assert (
        "n4: Exited with exit code 2; printed last: slurmstepd: error" in found["errors"]["n4"][0]
    )
    if os.geteuid() == 0:
        kept = (tmp_path / "state/nodes/n3.jsonl").read_text()
        assert (
            '"gemm"' in kept
            and '"pair"' in kept
            and not (tmp_path / "state/nodes/n4.jsonl").exists()
        )
        assert sorted(p.name for p in (tmp_path / "spool").iterdir() if p.is_dir()) == []


def test_the_step_takes_nothing_from_what_runs_there() -> None:
    argv = start.step_argv(["n1", "n2"], "/usr/bin/python3")
    assert {"--overlap", "--ntasks=2", "--nodelist=n1,n2", "--kill-on-bad-exit=0"} <= set(argv)
    env = {"SLURM_LAUNCH_NODE_IPADDR": "fe80::1", "SLURMD_NODENAME": "n2", "SLURM_LOCALID": "0"}
    assert start.task_env({**env, "ROBUST_TEST_SERVER": ":4000"}) == {
        "ROBUST_TEST_SERVER": "[fe80::1]:4000",
        "ROBUST_TEST_NODE": "n2",
        "ROBUST_TEST_LOCAL": "0",
    }
    with pytest.raises(KeyError):
        start.task_env({"ROBUST_TEST_SERVER": ":4000"})


def test_what_nobody_thought_of_blames_no_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-")
    monkeypatch.setattr("shutil.which", lambda _name: "/bin/true")
    assert active_cli.main(["--nodes", "all"]) == tables.UNTESTED
    assert "no node was judged" in capsys.readouterr().err
