"""A GPU as a test left it: compared, put back; by the real pynvml over the fake NVML."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import REPOSITORY

from health.active.nvidia import gpu_state
from health.active.nvidia.gpu_state import Gpu, GpuState
from lab.machine import fake_nvml

WELL = {
    "app_sm": 1980, "app_memory": 2619, "power_limit": 700000, "enforced_limit": 700000,
    "persistence": 1, "compute_mode": 0, "mig": 0, "mig_pending": 0, "ecc": 1, "ecc_pending": 1,
}  # fmt: skip
needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="builds the fake NVML")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may set")


def gpu(index: int = 0, **other: int) -> Gpu:
    return Gpu(index, f"GPU-{index}", {**WELL, **other})


def told(before: GpuState, after: GpuState) -> list[tuple[str, str, str, str, str]]:
    return [
        (f.status, f.cls, f.device, f.action, f.evidence)
        for f in gpu_state.differences(before, after)
    ]


def test_the_same_is_no_finding() -> None:
    state = GpuState((gpu(0), gpu(1)))
    assert told(state, state) == [] and told(GpuState(), GpuState()) == []


def test_a_gpu_that_is_slower_from_now_on_fails_the_node() -> None:
    after = GpuState((gpu(0, app_sm=1410), gpu(1, power_limit=500000, enforced_limit=500000)))
    assert told(GpuState((gpu(0), gpu(1))), after) == [
        ("FAIL", "node", "gpu0", "reset-gpu",
         "application clock of the SMs 1980 MHz before the tests, 1410 MHz after (NVML); "
         "nvidia-smi -i 0 -ac MEMORY,1980"),
        ("FAIL", "node", "gpu1", "reset-gpu",
         "power limit 700 W before the tests, 500 W after (NVML); nvidia-smi -i 1 -pl 700"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"app_sm": 2100}, "application clock of the SMs 1980 MHz before the tests, 2100 MHz"),
        ({"persistence": 0}, "persistence mode on before the tests, off after"),
        ({"compute_mode": 3}, "compute mode default before the tests, exclusive_process after"),
        ({"mig_pending": 1}, "MIG mode after the next reset off before the tests, on after"),
        ({"ecc_pending": 0}, "ECC mode after the next reset on before the tests, off after"),
    ],
)
def test_any_other_change_is_a_warning(other: dict[str, int], words: str) -> None:
    [(status, cls, device, action, evidence)] = told(GpuState((gpu(),)), GpuState((gpu(**other),)))
    assert (status, cls, device, action) == ("WARN", "tool", "gpu0", "none")
    assert evidence.startswith(words)


def test_the_enforced_limit_alone_is_told() -> None:
    [(status, _, _, _, evidence)] = told(
        GpuState((gpu(),)), GpuState((gpu(enforced_limit=400000),))
    )
    assert status == "FAIL" and evidence.startswith("enforced power limit 700 W")


def test_a_gpu_is_the_same_one_under_another_number() -> None:
    after = GpuState((Gpu(0, "GPU-1", WELL), Gpu(1, "GPU-0", {**WELL, "persistence": 0})))
    [(_, _, device, _, _)] = told(GpuState((gpu(0), gpu(1))), after)
    assert device == "gpu0"  # by the number that it had


@pytest.mark.parametrize(
    ("lost", "action"),
    [
        ({1: "NVML_ERROR_GPU_IS_LOST"}, "reboot"),
        ({1: "NVML_ERROR_RESET_REQUIRED"}, "reset-gpu"),
        ({}, "reboot"),
    ],
)
def test_a_gpu_that_does_not_answer_after_fails(lost: dict[int, str], action: str) -> None:
    [one] = told(GpuState((gpu(0), gpu(1))), GpuState((gpu(0),), lost))
    assert one[:4] == ("FAIL", "node", "gpu1", action)


def test_what_is_not_told_any_more_is_a_warning_and_what_never_was_is_none() -> None:
    less = {key: value for key, value in WELL.items() if key != "power_limit"}
    after = Gpu(0, "GPU-0", less, {"power_limit": "NVML_ERROR_UNKNOWN"})
    [one] = told(GpuState((gpu(),)), GpuState((after,)))
    assert one[0] == "WARN" and "not reported after: NVML_ERROR_UNKNOWN" in one[4]
    assert (
        told(GpuState((after,)), GpuState((after,)))
        == told(GpuState((after,)), GpuState((gpu(),)))
        == []
    )


def test_what_could_not_be_read_is_an_error_of_the_tool() -> None:
    for before, after in (
        (GpuState(error="x"), GpuState()),
        (GpuState((gpu(),)), GpuState(error="x")),
    ):
        [finding] = gpu_state.differences(before, after)
        assert (finding.status, finding.cls, finding.check) == ("ERROR", "tool", "active-error")


def test_busy_gpus_are_named() -> None:
    state = GpuState((Gpu(0, "a", WELL, {}, (7, 8)), gpu(1, mig=1), gpu(2)))
    assert gpu_state.busy(state) == ("gpu0 is used by process 7, 8", "gpu1 has MIG on")
    assert gpu_state.mig(state) == ("gpu1",)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def node(library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Sets what the fake says; take() asks in a process of its own, which finds it."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    path = library.with_name("nvml.state")

    def says(*lines: str) -> Path:
        path.write_text("\n".join(("count=2", *lines)) + "\n")
        return path

    says()
    return says


@needs_cc
def test_everything_is_taken(node: Callable[..., Path]) -> None:
    node("gpu1.processes=4711:1024", "gpu1.mig_pending=1")
    state = gpu_state.take()
    assert (state.error, state.lost, len(state.gpus)) == ("", {}, 2)
    one, other = state.gpus
    assert (one.values, one.missing, one.processes) == (WELL, {}, ())
    assert other.values == {**WELL, "mig_pending": 1} and other.processes == (4711,)
    assert one.uuid != other.uuid


@needs_cc
def test_what_a_board_does_not_have_is_missing_with_its_reason(node: Callable[..., Path]) -> None:
    node("gpu.error.nvmlDeviceGetApplicationsClock=NVML_ERROR_NOT_SUPPORTED", "gpu1.lost=handle")
    state = gpu_state.take()
    assert dict(state.lost) == {1: "NVML_ERROR_GPU_IS_LOST"}
    assert state.gpus[0].missing == {
        "app_sm": "NVML_ERROR_NOT_SUPPORTED",
        "app_memory": "NVML_ERROR_NOT_SUPPORTED",
    }
    assert gpu_state.differences(state, state) == []


@needs_cc
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("hang=sleep", "asked for init"),
        ("gpu1.hang.nvmlDeviceGetPersistenceMode=sleep", "asked for gpu1 persistence"),
    ],
)
def test_a_hang_is_told_where_it_is_and_held_by_nobody(
    node: Callable[..., Path], line: str, words: str
) -> None:
    node(line)
    began = time.monotonic()
    state = gpu_state.take(4.0)
    assert time.monotonic() - began < 20
    # Of the 4 s it has what the start of its process has left, rounded.
    assert re.search(r"did not end within [1-4] s", state.error) and words in state.error


@needs_cc
def test_an_nvml_that_fails_is_an_error_and_none_is_a_node_without_gpus(
    node: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    node("init=NVML_ERROR_LIB_RM_VERSION_MISMATCH")
    assert gpu_state.take().error == "NVML_ERROR_LIB_RM_VERSION_MISMATCH"
    node("init=NVML_ERROR_DRIVER_NOT_LOADED")
    monkeypatch.setattr(gpu_state, "driver_loaded", lambda: False)
    assert gpu_state.take() == GpuState()
    monkeypatch.setattr(gpu_state, "driver_loaded", lambda: True)
    assert gpu_state.take().error == "NVML_ERROR_DRIVER_NOT_LOADED"


@needs_cc
@needs_root
def test_what_a_test_changed_is_put_back(node: Callable[..., Path]) -> None:
    before = gpu_state.take()
    node(
        "gpu0.clocks.app_sm=1410", "gpu0.persistence=0", "gpu0.mig_pending=1",
        "gpu1.power.limit=500000", "gpu1.power.enforced_limit=500000", "gpu1.compute_mode=3",
    )  # fmt: skip
    found = gpu_state.restore(before, gpu_state.take())
    assert {f.status for f in found} == {"WARN"}
    assert sorted((f.device, f.evidence.endswith("; put back")) for f in found) == [
        ("gpu0", False), ("gpu0", True), ("gpu0", True), ("gpu1", True), ("gpu1", True),
    ]  # fmt: skip
    assert gpu_state.take().gpus[1] == before.gpus[1]


@needs_cc
@needs_root
def test_what_cannot_be_put_back_stays_a_failure(node: Callable[..., Path]) -> None:
    before = gpu_state.take()
    node(
        "gpu0.power.limit=500000", "gpu0.power.enforced_limit=500000",
        "gpu0.error.nvmlDeviceSetPowerManagementLimit=NVML_ERROR_NOT_SUPPORTED",
    )  # fmt: skip
    one, why = gpu_state.restore(before, gpu_state.take())
    assert (one.status, one.action) == ("FAIL", "reset-gpu")
    assert why.status == "WARN" and "SetPowerManagementLimit(700000) of GPU-" in why.evidence
    assert "NVML_ERROR_NOT_SUPPORTED" in why.evidence


@needs_cc
@needs_root
def test_a_setting_that_hangs_ends_at_the_deadline(node: Callable[..., Path]) -> None:
    before = gpu_state.take()
    node("gpu0.persistence=0", "gpu0.hang.nvmlDeviceSetPersistenceMode=sleep")
    found = gpu_state.restore(before, gpu_state.take(), deadline_s=5.0)
    assert [f.status for f in found] == ["WARN", "WARN"]
    assert "nvmlDeviceSetPersistenceMode" in found[1].evidence


def test_nobody_but_root_sets_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_child(*_: object) -> Any:
        raise AssertionError

    monkeypatch.setattr(gpu_state, "_in_child", no_child)
    before, after = GpuState((gpu(),)), GpuState((gpu(persistence=0),))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert gpu_state.restore(before, after) == gpu_state.differences(before, after) != []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert gpu_state.restore(before, before) == []


def test_none_of_it_imports_pynvml_or_torch() -> None:
    code = (
        "import sys, json; from health.active.nvidia import dcgm, gpu_nvml, gpu_state, nccl_tests; "
        "print(json.dumps([m for m in ('torch', 'pynvml') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == []
