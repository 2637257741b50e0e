"""NVIDIA's tools on a job's nodes: a task's answer, a step of tasks, and what becomes of both."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import REPOSITORY

from health.active.coordinator import runs
from health.active.coordinator.procedure import Measurements, WantedTests
from health.active.coordinator.session import About
from health.active.judging.fleet import NO_BASELINES
from health.active.judging.judge import judge
from health.active.nvidia import dcgm, gpu_use, job_tools, nccl_tests
from health.active.nvidia.gpu_use import GpuUse
from health.active.nvidia.job_tools import ToolResults, read
from health.active_tests import Measured
from health.finding import Finding

BAD = Finding("FAIL", "node", "active-dcgm", "gpu1", "dcgmi memory: fail", "service")
GPU = GpuUse(0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[GpuUse]:
    """The GPUs of the node: they may be changed."""
    gpus = [GPU, GPU._replace(number=1)]
    monkeypatch.setattr(gpu_use, "take", lambda: tuple(gpus))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    return gpus


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The questions to dcgmi and nccl-tests, which both have something to say."""
    noted: dict[str, Any] = {}

    def diag(level: str, limit_s: float, **more: Any) -> tuple[list[Finding], list[str]]:
        noted["dcgm"] = (level, limit_s, more["run_level"])
        return [BAD], []

    def reduced(limit_s: float, **more: Any) -> tuple[list[Measured], list[str]]:
        noted["nccl"] = (limit_s, more["gpus"])
        return [Measured("local", more["node"], values={"nccl_tests_busbw_gbps": 300.0})], ["late"]

    monkeypatch.setattr(dcgm, "run", diag)
    monkeypatch.setattr(nccl_tests, "run", reduced)
    return noted


def test_a_task_runs_both(
    two_gpus: list[GpuUse], asked: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert job_tools.main(["standard", "300", "0", "dcgm", "nccl-tests"]) == 0
    level, limit, run_level = asked["dcgm"]
    assert (level, run_level, asked["nccl"][1]) == ("standard", None, 2) and 290 < limit <= 300
    found = read(capsys.readouterr().out)["n1"]
    assert found.findings == (BAD,) and found.left_out == ("late",)
    assert found.ran == {"dcgm", "local"}
    assert job_tools.main(["long", "5000", "4", "dcgm"]) == 0
    assert asked["dcgm"][2] == 4 and "nccl" in asked


@pytest.mark.parametrize(
    ("gpus", "finding", "left_out"),
    [
        ([], None, ("dcgm: no NVIDIA GPU", "nccl-tests: no NVIDIA GPU")),
        ([GPU._replace(processes=(77,))], "gpu0 is used by process 77", ()),
        ([GPU._replace(mig=True)], "gpu0 has MIG on", ()),
    ],
)
def test_where_nothing_may_be_run(
    gpus: list[GpuUse],
    finding: str | None,
    left_out: tuple[str, ...],
    two_gpus: list[GpuUse],
    asked: dict[str, Any],
) -> None:
    two_gpus[:] = gpus
    found = job_tools.task("quick", 60.0, None, job_tools.TOOLS)
    assert not asked and found.left_out == left_out and not found.ran
    assert [f.status for f in found.findings] == ([] if finding is None else ["ERROR"])
    assert finding is None or finding in found.findings[0].evidence


def line(node: str, **more: Any) -> str:
    said = {"node": node, "findings": [], "measured": [], "left_out": []} | more
    return f"ROBUST-NVIDIA {json.dumps(said)}"


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", set()),
        (f"0: {line('n1')}\n1: {line('n2')}\nbanner\n", {"n1", "n2"}),
        (f"{line('n1')}\nROBUST-NVIDIA {{\n1: ROBUST-NVIDIA {{}}\n", {"n1"}),
        (line("n1", findings=[{"status": "FAIL"}]), set()),
        (line("n1", findings=[BAD.as_dict() | {"action": "explode"}]), set()),
        (line("n1", measured=[{"test": "dcgm", "values": 3}]), set()),
        (line("n1", left_out=None), set()),
        (f"x {line('n1')}", set()),
    ],
)
def test_what_a_step_prints(text: str, nodes: set[str]) -> None:
    assert set(read(text)) == nodes


@given(st.text(max_size=80))
def test_no_line_is_a_traceback(text: str) -> None:
    assert "n1" in read(f"ROBUST-NVIDIA {{{text}}}\n{line('n1')}")


def srun(directory: Path, lines: str) -> list[str]:
    """A stand-in for srun, with a whole step's output."""
    script = directory / "srun"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    return [str(script)]


def test_who_says_nothing_could_not_be_tested(tmp_path: Path) -> None:
    said = line("n1", findings=[BAD.as_dict()], measured=[{"test": "dcgm"}])
    argv = srun(tmp_path, f"echo '0: {said}'; echo 'srun: error: n2: task 1: boom' >&2; exit 1")
    found = job_tools.step(argv, os.environ, ["n1", "n2"], 30.0)
    assert found["n1"] == ToolResults((BAD,), (Measured("dcgm", "n1"),), (), frozenset({"dcgm"}))
    (error,) = found["n2"].findings
    assert (error.status, error.check) == ("ERROR", "active-error")
    assert "exit code 1: srun: error: n2: task 1: boom" in error.evidence
    for argv in ([str(tmp_path / "none")], srun(tmp_path, "exec sleep 60")):
        begun = time.monotonic()
        found = job_tools.step(argv, os.environ, ["n1"], 1.0)
        assert [one.status for one in found["n1"].findings] == ["ERROR"]
        assert time.monotonic() - begun < 20


TASKS = """\
for node in n1 n2; do SLURMD_NODENAME=$node {python} -P "$@"; done
"""


def test_a_step_of_real_tasks_without_a_gpu(tmp_path: Path) -> None:
    if gpu_use.take():
        pytest.skip("there is a GPU")
    words = job_tools.argv([], "quick", 30.0, None, job_tools.TOOLS)
    argv = srun(tmp_path, TASKS.format(python=sys.executable))
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    found = job_tools.step([*argv, *words], env, ["n1", "n2"], 60.0)
    assert found == {
        node: ToolResults(left_out=("dcgm: no NVIDIA GPU", "nccl-tests: no NVIDIA GPU"))
        for node in ("n1", "n2")
    }
    assert job_tools.left_out(found) == ("dcgm: no NVIDIA GPU", "nccl-tests: no NVIDIA GPU")
    some = found | {"n3": ToolResults(left_out=("dcgm: MIG is on",))}
    assert "dcgm: MIG is on (n3)" in job_tools.left_out(some)


def plan(*wanted: str) -> runs.RunPlan:
    return runs.RunPlan(
        ("n1", "n2"), WantedTests((), "quick", 60.0), wanted or job_tools.TOOLS, "/opt/p",
        NO_BASELINES, lambda _line: None,
    )  # fmt: skip


def test_they_fail_a_node_as_our_own_tests_do(tmp_path: Path) -> None:
    row = Measured("local", "n1", values={"nccl_tests_busbw_gbps": 300.0}).as_dict()
    text = line("n1", findings=[BAD.as_dict()], measured=[{"test": "dcgm"}, row], gpus=8)
    healthy = line("n2", measured=[{"test": "dcgm"}])
    argv = srun(tmp_path, f"echo '{text}'; echo '{healthy}'")
    asked: list[list[str]] = []

    def words(nodes: Any, command: Any) -> list[str]:
        asked.append([*nodes, *command])
        return argv

    about = {"n1": About("2", "nccl", ("gpu0",), ("H100",), "10.0.0.1")}
    found = runs.tools_on_step(plan(), about, 60.0, words, os.environ)
    assert asked[0][:3] == ["n1", "n2", "/opt/p"] and asked[0][-2:] == ["dcgm", "nccl-tests"]
    ours = Measurements((), None, {"n2": frozenset({"gemm"})}, 1.0, (), devices={"n2": 4})
    outcome = runs.with_tools(ours, found)
    assert outcome.devices == {"n1": 8, "n2": 4}
    assert {m.model for m in outcome.measured if m.values} == {"H100"}
    assert outcome.asked == {"n1": {"dcgm", "local"}, "n2": {"dcgm", "gemm"}}
    judged = judge(**outcome._asdict())
    assert list(judged.named) == ["n1"] and list(judged.errors) == ["n2"]  # gemm: no result
    assert not runs.tools_on_step(plan(), {}, 20.0, words, os.environ)["n1"].ran
    assert len(asked) == 1, "without the time for a step there is none"


def test_a_job_without_gpus_has_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = About("2", "gloo", ("cpu",), ("cpu",), "10.0.0.1")

    async def tested(*_of: Any, **_more: Any) -> tuple[Measurements, dict[str, About]]:
        return Measurements((), None, {}, 0.0, ()), {"n1": cpu, "n2": cpu}

    stepped: list[Any] = []
    monkeypatch.setattr(runs, "_tested", tested)
    monkeypatch.setattr(runs, "_leaves", dict)
    monkeypatch.setattr(job_tools, "step", lambda *of: stepped.append(of) or {})
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert runs.on_job(plan()).outcome.left_out == ("dcgm, nccl-tests: no node has a GPU",)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert runs.on_job(plan("dcgm")).outcome.left_out == () and len(stepped) == 1
