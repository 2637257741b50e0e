"""robust-health test: what it prints, its exit codes, what it leaves, what it says to bad input."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_active_test
import health_site
import pytest

from health import cli
from health.active import cli as active_cli
from health.active.coordinator import runs
from health.active.coordinator.procedure import Measurements
from health.active.judging import fleet, records, tables
from health.active.judging.profiles import with_site
from health.active.nvidia import dcgm, gpu_use
from health.active.nvidia.gpu_use import GpuUse
from health.active_tests import Measured
from health.history import events as history
from robust_slurm.command_line.plain_text import OutputError

site, python, run = health_site.site, fake_active_test.python, fake_active_test.run


def test_a_healthy_machine_is_0(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(python) == 0
    out = capsys.readouterr().out
    assert "fp32_tflops 2.5" in out and "n1: 1 passed, 0 bad, 0 not decided" in out
    assert "skipped: links: no node has a GPU that torch can use" in out and "\x1b" not in out
    assert "skipped: dcgmi diag -r 1: dcgmi is not installed" in out


def test_results_are_recorded_by_root_and_compared_with_the_fleet(
    python: str, site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root records")
    assert run(python, "gemm", "bitwise") == 0
    events = history.load(str(tmp_path / "spool"))
    assert {e.kind for e in events} == {"active"} and len(events) == 2
    assert {e.data["test"]: e.data["values"] for e in events}["gemm"] == {"fp32_tflops": 2.5}
    assert (tmp_path / "state/nodes/n1.jsonl").exists()
    for number in range(20, 30):
        usual = Measured("gemm", f"n{number}", "cpu", "cpu", {"fp32_tflops": 9.0})
        event = events[0]._replace(data=fleet.event_data(usual, "quick"))
        (tmp_path / f"state/nodes/n{number}.jsonl").write_bytes(history.line(event))
    assert run(python, "gemm") == 0
    out = capsys.readouterr().out
    assert "n1: active-gemm-slow: fp32_tflops 2.5 is below 5.4, 0.6 of the median 9 of 11" in out
    assert "slow    fp32_tflops 2.5  5.4" in out


def test_nobody_else_writes(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(python, "bitwise") == 0
    assert not list((tmp_path / "spool").iterdir()) and not list(
        (tmp_path / "state/nodes").iterdir()
    )


def test_wrong_arithmetic_is_1(
    python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_WORKER", "wrong")
    assert run(python, "--json") == 1
    out = capsys.readouterr().out
    found = json.loads(out)
    assert set(found) == {
        *("findings", "named", "cleared", "errors", "left_out", "seconds", "measured"),
    }
    (finding,) = found["findings"]["n1"]
    assert (finding["check"], finding["class"]) == ("active-gemm-wrong", "node")
    assert list(found["named"]) == ["n1"] and found["cleared"] == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("unable", "the worker on n1 cannot test: torch cannot be imported: No module named"),
        ("absent", "ended with exit code 1; printed last: No module named health"),
    ],
)
def test_what_cannot_be_tested_is_3(
    kind: str,
    said: str,
    python: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_WORKER", kind)
    assert run(python) == 3
    out, err = capsys.readouterr()
    assert said in out and "could not test n1" in out and "is bad" not in out
    assert "install them there or name another interpreter with --python" in err


def test_tests_that_cannot_run_here_are_3(python: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(python, "pair") == 3
    assert "skipped: pair: needs two nodes" in capsys.readouterr().out
    assert run(python, "dcgm") == 3
    assert run(python, "nccl-tests") == 3


def test_gpus_in_use_are_not_tested(
    python: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_use, "take", lambda: (GpuUse(0, (4242,)),))
    assert run(python) == 3
    out = capsys.readouterr().out
    assert "gpu0 is used by process 4242" in out and "fp32_tflops" not in out and "bitwise" in out


def test_who_came_meanwhile_is_seen(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = iter((GpuUse(0, pids),) for pids in ((), (4242,)))
    monkeypatch.setattr(gpu_use, "take", lambda: next(uses))
    done: list[runs.RunResult] = []
    tested = runs.on_this_machine

    def noted(plan: runs.RunPlan) -> runs.RunResult:
        done.append(tested(plan))
        return done[-1]

    monkeypatch.setattr(active_cli, "on_this_machine", noted)
    assert run(python, "gemm") == 0, "a speed that is good although"
    assert done[0].disturbed == ("gpu0 is used by process 4242",)


@pytest.mark.parametrize(
    ("words", "level"), [((), None), (("--dcgm-level", "4"), 4), (("--dcgm-level", "1"), 1)]
)
def test_the_level_of_dcgmi_may_be_another(
    words: tuple[str, ...], level: int | None, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def noted(*_of: object, run_level: int | None, **_more: object) -> tuple[list[Any], list[str]]:
        asked.append(run_level)
        return [], []

    monkeypatch.setattr(dcgm, "run", noted)
    assert run(python, "dcgm", *words) == 0
    assert asked == [level]


@pytest.mark.parametrize(
    ("wrong", "disturbed", "found"),
    [
        ((), (), [("FAIL", "active-gemm-slow")]),
        ((), ("gpu0 is used by process 4242",), [("ERROR", "active-error")]),
        (
            ("row 3",),
            ("gpu0 is used by process 4242",),
            [("FAIL", "active-gemm-wrong"), ("ERROR", "active-error")],
        ),
    ],
)
def test_slow_beside_others_is_no_fault(
    wrong: tuple[str, ...], disturbed: tuple[str, ...], found: list[tuple[str, str]]
) -> None:
    one = Measured("gemm", "n1", "gpu0", "X", {"bf16_tflops": 1.0}, wrong=wrong)
    outcome = Measurements((one,), None, {"n1": frozenset({"gemm"})}, 1.0, ())
    floors = with_site({"X": {"bf16_tflops": 100.0}})
    done = runs.RunResult(outcome, disturbed)
    judged = active_cli._judged(done, fleet.NO_BASELINES, floors)
    assert [(f.status, f.check) for f in judged.findings["n1"]] == found
    assert judged.cleared == set()


def test_a_file_system_that_hangs_takes_no_verdict(
    python: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root records")
    monkeypatch.setattr(fleet, "recorded", lambda state_dir: signal.pause())
    printed: list[str] = []

    def hang(*of: object) -> None:
        signal.pause()

    write = records.write

    def noted(*of: Any) -> str:
        printed.append(capfd.readouterr().out)
        return write(*of)

    monkeypatch.setattr(history, "share", hang)
    monkeypatch.setattr(records, "write", noted)
    begun = time.monotonic()
    assert run(python, "bitwise", "--json", "--limit", "8") == 0
    assert time.monotonic() - begun < 8
    assert json.loads(printed[0])["cleared"] == ["n1"], "before it is written down"
    assert "not fully recorded: it does not answer, as before" in capfd.readouterr().err


def test_what_nobody_reads_is_recorded(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root records")

    def closed(*of: object) -> None:
        raise OutputError(BrokenPipeError())

    monkeypatch.setattr(tables, "show", closed)
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # it is closed
    assert run(python, "bitwise") == 3
    assert history.load(str(tmp_path / "spool"))


@pytest.mark.parametrize(
    ("after", "code"),
    [
        ((GpuUse(0), GpuUse(1, error="NVML_ERROR_GPU_IS_LOST")), 1),
        ((GpuUse(0), GpuUse(1, error="NVML_ERROR_TIMEOUT")), 0),
        ((GpuUse(0),), 0),  # NVML was slow: the second one was not asked in time
        ((), 0),
    ],
)
def test_a_gpu_is_lost_by_nvmls_own_word_alone(
    after: tuple[GpuUse, ...], code: int, python: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    uses = iter([(GpuUse(0), GpuUse(1)), after])
    monkeypatch.setattr(gpu_use, "take", lambda: next(uses))
    assert run(python, "bitwise") == code
    assert ("active-gpu-lost gpu1: answered" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gem"], "gem: no such test; did you mean gemm?"),
        (["qqqq"], "see robust-health test --list"),
        (["--limit", "0"], "--limit 0: seconds"),
        (["--limit", "nan"], "--limit nan: seconds"),
        (["--nodes", "n[1-2]"], "requires a job that owns the nodes (salloc, sbatch)"),
        (["--suspect", "n2"], "--suspect n2: n2 is not part of the test"),
        (["--suspect", "n[2"], "brackets do not match"),
        (["--python", "/nowhere/python"], "no such program"),
        (["--config", "/nowhere.toml"], "No such file"),
    ],
)
def test_bad_input_is_2(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["test", *words]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("robust-health test: ") and "Traceback" not in err


def test_nodes_that_are_not_of_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert cli.main(["test", "--nodes", "n[3-5]"]) == 2
    assert "--nodes n[3-5]: n5 is not part of job 7" in capsys.readouterr().err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["test", "--list"]) == 0
    out = capsys.readouterr().out
    assert "bitwise" in out and "exclusive, peer, torch" in out and "nccl-tests" in out


def test_keep(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(python, "bitwise", "--keep") == 0
    (path,) = tmp_path.glob("robust-test-*.log")
    assert str(path) in capsys.readouterr().err
    assert path.read_bytes() == b"the worker says hello\n"


@pytest.mark.slow
def test_this_machine_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(gpu_use, "take", tuple)
    assert cli.main(["test", "bitwise", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cleared"] == ["n1"] and found["measured"][0]["digests"]
