"""dcgmi diag: the output of its versions (as its sources write it), a run of it that hangs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import TESTS
from waiting import until

from health.active.nvidia import dcgm, tools
from health.active.nvidia.gpu_use import GpuUse
from health.active_tests import Level
from health.finding import Finding

DATA = TESTS / "data" / "active"
FREE = (GpuUse(0), GpuUse(1))


def judged(name: str) -> tuple[list[Finding], list[str]]:
    return dcgm.judge((DATA / name).read_text(), "")


def short(found: list[Finding]) -> list[tuple[str, str, str, str, str]]:
    return [(f.status, f.cls, f.device, f.action, f.evidence.split(":")[0]) for f in found]


def test_version_2_says_why_in_a_text_only() -> None:
    found, left_out = judged("dcgm_2.4.json")
    assert short(found) == [
        ("ERROR", "tool", "", "none", "dcgmi Graphics Processes"),
        ("FAIL", "node", "gpu1", "service", "dcgmi PCIe"),
        ("ERROR", "tool", "gpu1", "none", "dcgmi GPU Memory"),
    ]
    assert left_out == ["dcgmi Pulse Test: skipped on gpu0, gpu1"]


def test_version_3_has_severities() -> None:
    found, left_out = judged("dcgm_3.3.json")
    assert short(found) == [
        ("ERROR", "tool", "gpu0", "none", "dcgmi Persistence Mode"),
        ("FAIL", "node", "gpu1", "reset-gpu", "dcgmi Page Retirement/Row Remap"),
        ("FAIL", "node", "gpu1", "service", "dcgmi GPU Memory"),
        ("WARN", "node", "gpu0", "none", "dcgmi Targeted Stress"),
    ]
    assert found[2].evidence == (
        "dcgmi GPU Memory: fail: Found 12 faulty memory elements on GPU 1 "
        "(DCGM error 52, severity 2) [serial 1650000000011]"
    )
    assert left_out == ["dcgmi EUD Test: skipped on gpu0, gpu1"]


def test_version_4_goes_by_entity_and_its_summary_is_not_told_twice() -> None:
    found, left_out = judged("dcgm_4.4.json")
    assert short(found) == [
        ("FAIL", "node", "", "service", "dcgmi software"),  # of the switch: in the summary only
        ("ERROR", "tool", "gpu0", "none", "dcgmi memory"),  # no CUDA context: not tested
        ("FAIL", "node", "gpu1", "service", "dcgmi diagnostic"),
    ]
    assert "[serial 1650000000011]" in found[2].evidence
    assert left_out == ["dcgmi eud: skipped on the node"]


@pytest.mark.parametrize(
    ("out", "status", "words"),
    [
        ("", "ERROR", "no result in JSON"),
        ("{", "ERROR", "no result in JSON"),
        ('{"DCGM Diagnostic": []}', "ERROR", "no result in JSON"),
        ('{"DCGM Diagnostic": {"test_categories": []}}', "ERROR", "it ran no test"),
        ('{"DCGM Diagnostic": {"test_categories": [1, {"tests": [{"results": 3}]}]}}',
         "ERROR", "it ran no test"),
        ('note\n{"DCGM Diagnostic": {"runtime_error": "Error: paused"}}', "ERROR", "Error: paused"),
    ],
)  # fmt: skip
def test_what_is_no_verdict_is_an_error_of_the_tool(out: str, status: str, words: str) -> None:
    [one], left_out = dcgm.judge(out, "")
    assert (one.status, one.cls, left_out) == (status, "tool", []) and words in one.evidence


def test_no_host_engine_says_what_to_start() -> None:
    [one], _ = judged("dcgm_unreachable.txt")
    assert one.status == "ERROR" and "systemctl start nvidia-dcgm" in one.evidence


def test_another_diagnostic_and_mig_are_left_out() -> None:
    assert judged("dcgm_4.4_running.json") == ([], ["dcgmi diag: another diagnostic is running"])
    said = "GPU 2's MIG configuration is incompatible with the diagnostic because it prevents "
    assert dcgm.judge(said, "") == ([], ["dcgmi diag: MIG is on"])


def _one(status: str, **error: object) -> tuple[str, str, str]:
    entry: dict[str, object] = {"entity_id": 0, "entity_group": "GPU", "status": status}
    if error:
        entry["warnings"] = [{"warning": error.pop("text", "x"), **error}]
    body = {"test_categories": [{"tests": [{"name": "memory", "results": [entry]}]}]}
    [one], _ = dcgm.judge(json.dumps({"DCGM Diagnostic": body}), "")
    return one.status, one.cls, one.action


@pytest.mark.parametrize(
    ("error_id", "category", "severity", "expected"),
    [
        (52, 10, 2, ("FAIL", "node", "service")),  # faulty memory
        (81, 5, 2, ("FAIL", "node", "reset-gpu")),  # uncontained
        (120, 15, 2, ("FAIL", "node", "reboot")),  # off the bus
        (24, 4, 2, ("ERROR", "tool", "none")),  # the NVML library is bad
        (85, 10, 6, ("FAIL", "node", "reset-gpu")),  # row remapping pending
        (25, 8, 6, ("ERROR", "tool", "none")),  # graphics processes, "reset" by DCGM's table
        (14, 11, 4, ("FAIL", "node", "service")),  # NVLink down
        (101, 5, 4, ("FAIL", "node", "service")),  # Xid
        (90, 7, 4, ("ERROR", "tool", "none")),  # EUD is not run by root
        (95, 7, 2, ("FAIL", "node", "service")),  # EUD failed
        (44, 16, 4, ("ERROR", "tool", "none")),  # internal
        (46, 13, 5, ("ERROR", "tool", "none")),  # PCIe width, "config"
        (102, 10, 1, ("WARN", "node", "none")),
        (1, 0, 3, ("ERROR", "tool", "none")),  # nobody says what
    ],
)
def test_the_severity_and_what_was_in_the_way(
    error_id: int, category: int, severity: int, expected: tuple[str, str, str]
) -> None:
    error = {"error_id": error_id, "error_category": category, "error_severity": severity}
    assert _one("Fail", **error) == expected


def test_a_fault_that_a_burn_before_makes_up_fails_nobody() -> None:
    text = "The memory copy utilization for the GPU: 2 is greater than 10%. This may affect"
    error = {"error_id": 38, "error_category": 1, "error_severity": 4, "text": text}
    assert _one("Fail", **error) == ("ERROR", "tool", "none")


def test_a_failure_without_a_word_is_one_and_a_pass_with_one_is_a_warning() -> None:
    assert _one("Fail") == ("FAIL", "node", "service")
    assert _one("Pass", error_id=56, error_severity=4) == ("WARN", "tool", "none")
    assert _one("") == ("ERROR", "tool", "none")


_VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["tests", "results", "warnings", "status", "name", "entity_id", "gpu_ids",
                 "test_summary", "warning", "error_severity", "tests"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.slow
@given(st.lists(_VALUES, max_size=3), _VALUES)
def test_no_shape_of_it_is_a_traceback(categories: object, groups: object) -> None:
    whole = {"entity_groups": groups, "GPU Device Serials": groups}
    body = {"test_categories": categories}
    found, left_out = dcgm.judge(json.dumps({**whole, "DCGM Diagnostic": body}), "")
    assert found or left_out or categories


def fake(directory: Path, lines: str) -> tuple[str]:
    """A stand-in for dcgmi, which no machine without NVIDIA's GPUs has."""
    script = directory / "fake_dcgmi"
    script.write_text(f"#!/bin/sh\n{lines}\n")
    script.chmod(0o755)
    (directory / "dcgmi").symlink_to(script)
    return (str(directory),)


def test_it_is_run_by_its_level_and_its_output_is_judged(tmp_path: Path) -> None:
    where = fake(tmp_path, f'echo "$@" > {tmp_path}/args; cat {DATA}/dcgm_4.4.json; exit 226')
    found, _ = dcgm.run("standard", 600.0, gpus=FREE, directories=where)
    assert (tmp_path / "args").read_text() == "diag -r 2 -j\n"
    assert len(found) == 3
    dcgm.run("standard", 6000.0, run_level=4, directories=where)
    assert (tmp_path / "args").read_text() == "diag -r 4 -j\n"


def test_all_passed_but_an_exit_code_is_no_pass(tmp_path: Path) -> None:
    where = fake(tmp_path, f"cat {DATA}/dcgm_4.4_pass.json; exit $(cat {tmp_path}/code)")
    (tmp_path / "code").write_text("0")
    assert dcgm.run("quick", 60.0, directories=where) == ([], [])
    (tmp_path / "code").write_text("226")
    [one], _ = dcgm.run("quick", 60.0, directories=where)
    assert one.status == "ERROR" and "exit code 226" in one.evidence


def test_past_the_limit_it_is_asked_to_stop_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcgm, "LEAST_S", {1: 0.1})
    stop = f"trap 'echo stopped > {tmp_path}/stopped; exit 1' TERM; echo x; sleep 60 & wait"
    began = time.monotonic()
    [one], _ = dcgm.run("quick", 3.0, directories=fake(tmp_path, stop))
    assert one.status == "ERROR" and "did not end within" in one.evidence
    assert (tmp_path / "stopped").exists() and time.monotonic() - began < 20


def test_one_that_heeds_no_signal_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dcgm, "LEAST_S", {1: 0.1})
    lines = f"trap '' TERM; sleep 60 & echo $! > {tmp_path}/pid; wait; wait"
    began = time.monotonic()
    [one], _ = dcgm.run("quick", 3.0, directories=fake(tmp_path, lines))
    assert one.status == "ERROR" and time.monotonic() - began < 20
    child = int((tmp_path / "pid").read_text())
    until(lambda: _gone(child), "the end of what it has started", 10)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_is_left_out_and_why(tmp_path: Path) -> None:
    used, split = (GpuUse(0, (77,)),), (GpuUse(0, mig=True),)
    where = fake(tmp_path, f"cat {DATA}/dcgm_4.4_pass.json")
    assert dcgm.run("quick", 60.0, gpus=used, directories=where) == ([], [])
    cases: tuple[tuple[Level, float, tuple[GpuUse, ...], str], ...] = (
        ("standard", 600.0, used, "gpu0 is used by process 77"),
        ("quick", 600.0, split, "gpu0 has MIG on"),
        ("long", 60.0, FREE, "takes 600 s or more, 60 s were left"),
    )
    for level, limit_s, gpus, words in cases:
        found, [line] = dcgm.run(level, limit_s, gpus=gpus, directories=where)
        assert not found and words in line
    if not any(os.access(f"{place}/dcgmi", os.X_OK) for place in tools.FIXED):
        assert dcgm.run("quick", 60.0) == ([], ["dcgmi diag -r 1: dcgmi is not installed"])
