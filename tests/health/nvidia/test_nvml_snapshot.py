"""The collector with a fake driver library: the real pynvml, in a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest
from places import REPOSITORY

from lab.machine import fake_nvml

COLLECT = """
import json, sys, time
from health.nvidia.nvml import Collector
begin = time.monotonic()
snapshot = Collector(float(sys.argv[1])).wait()
print(json.dumps([snapshot, time.monotonic() - begin]))
"""
needs_cc = pytest.mark.skipif(not shutil.which("cc"), reason="builds the fake NVML")
Collect = Callable[..., tuple[Any, float]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def collect(library: Path) -> Collect:
    """Collect with this state of the fake; the snapshot and how long it took."""

    def collected(state: str = "", deadline_s: float = 20.0) -> tuple[Any, float]:
        library.with_name("nvml.state").write_text(state)
        return collect_elsewhere(library.parent, deadline_s)

    return collected


def collect_elsewhere(libraries: Path, deadline_s: float = 20.0) -> tuple[Any, float]:
    """Collect in a fresh process: this one may have an NVML loaded by another test."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(deadline_s)],
        cwd=REPOSITORY,
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    snapshot, took = json.loads(done.stdout)
    return snapshot, took


@needs_cc
def test_everything_the_snapshot_names_is_filled(collect: Collect) -> None:
    snapshot, _ = collect("count = 2\n")
    assert (snapshot["stage"], snapshot["hung"], snapshot["error"]) == ("done", False, "")
    assert snapshot["count"] == 2 and len(snapshot["devices"]) == 2 and snapshot["lost"] == []
    assert snapshot["driver"] and snapshot["nvml"] and snapshot["cuda"] == "12.8"
    device = snapshot["devices"][1]
    assert device["index"] == 1
    expected = {
        "memory": {"total", "used"},
        "ecc": {
            "enabled",
            "pending",
            "volatile_corrected",
            "volatile_uncorrected",
            "aggregate_corrected",
            "aggregate_uncorrected",
            "sram_threshold_exceeded",
        },
        "remap": {"corrected", "uncorrected", "pending", "failed", "spare_none"},
        "clocks": {
            "sm",
            "memory",
            "max_sm",
            "max_memory",
            "app_sm",
            "app_memory",
            "default_app_sm",
            "default_app_memory",
        },
        "temperature": {"gpu", "memory", "slowdown", "shutdown", "memory_max"},
        "power": {"draw", "limit", "default_limit", "enforced_limit"},
        "pcie": {"generation", "max_generation", "width", "max_width", "replays"},
        "fabric": {"state", "status", "health"},
    }
    for group, keys in expected.items():
        assert set(device[group]) == keys, group
    for key in ("uuid", "serial", "name", "vbios", "compute_mode"):
        assert isinstance(device[key], str) and device[key], key
    for key in ("persistence", "mig", "mig_pending"):
        assert isinstance(device[key], bool), key
    assert device["recovery_action"] == 0 and isinstance(device["throttle"], int)
    assert device["processes"] == []
    assert device["errors"] == {"retired": "NVML_ERROR_NOT_SUPPORTED"}
    assert device["pci"].count(":") == 2 and device["pci"] == device["pci"].lower()
    link = device["nvlinks"][0]
    assert link["active"] and set(link["errors"]) == {"replay", "recovery", "crc_flit", "crc_data"}
    assert link["remote"].count(":") == 2


@needs_cc
@pytest.mark.parametrize(
    ("state", "query", "name"),
    [
        ("gpu1.error.nvmlDeviceGetPowerUsage", "power.draw", "NVML_ERROR_UNKNOWN"),
        ("gpu1.error.nvmlDeviceGetMemoryInfo", "memory", "NVML_ERROR_TIMEOUT"),
        ("gpu1.error.nvmlDeviceGetSerial", "serial", "NVML_ERROR_NOT_SUPPORTED"),
        ("gpu1.error.nvmlDeviceGetMigMode", "mig", "NVML_ERROR_NO_PERMISSION"),
        ("gpu1.error.nvmlDeviceGetEccMode", "ecc.enabled", "NVML_ERROR_UNKNOWN"),
        ("gpu1.error.nvmlDeviceGetFieldValues", "recovery_action", "NVML_ERROR_UNKNOWN"),
        ("gpu1.error.nvmlDeviceGetFieldValues", "nvlinks", "NVML_ERROR_UNKNOWN"),
        ("gpu1.error.nvmlDeviceGetRemappedRows", "remap.rows", "NVML_ERROR_TIMEOUT"),
        ("gpu1.error.nvmlDeviceGetGpuFabricInfoV", "fabric", "NVML_ERROR_NO_PERMISSION"),
        ("gpu1.error.nvmlDeviceGetNvLinkState", "nvlinks.0", "NVML_ERROR_UNKNOWN"),
    ],
)
def test_a_refused_query_is_named_and_the_rest_is_asked(
    collect: Collect, state: str, query: str, name: str
) -> None:
    snapshot, _ = collect(f"count = 2\n{state} = {name}\n")
    assert snapshot["stage"] == "done" and len(snapshot["devices"]) == 2
    good, bad = snapshot["devices"]
    assert bad["errors"][query] == name
    assert query not in good["errors"]
    assert bad["uuid"] and bad["vbios"]


@needs_cc
@pytest.mark.parametrize("how", ["calls", "handle"])
def test_a_lost_gpu_is_told_and_the_others_are_asked(collect: Collect, how: str) -> None:
    snapshot, _ = collect(f"count = 3\ngpu1.lost = {how}\n")
    assert snapshot["count"] == 3 and snapshot["error"] == ""
    assert [device["index"] for device in snapshot["devices"]] == [0, 2]
    assert snapshot["lost"] == [{"index": 1, "pci": "", "error": "NVML_ERROR_GPU_IS_LOST"}]


@needs_cc
@pytest.mark.parametrize("error", ["NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED"])
def test_a_gpu_that_goes_while_it_is_asked_is_lost(collect: Collect, error: str) -> None:
    snapshot, _ = collect(f"count = 2\ngpu0.error.nvmlDeviceGetPowerUsage = {error}\n")
    assert [device["index"] for device in snapshot["devices"]] == [1]
    (lost,) = snapshot["lost"]
    assert lost["index"] == 0 and lost["error"] == error and lost["pci"].startswith("0000:")


@needs_cc
def test_a_hang_names_its_place_and_keeps_what_was_learnt(collect: Collect) -> None:
    state = "count = 4\ngpu2.hang.nvmlDeviceGetTotalEccErrors = sleep\n"
    snapshot, took = collect(state, 3.0)
    assert snapshot["hung"] is True and snapshot["stage"].startswith("gpu2 ecc (state S")
    assert [device["index"] for device in snapshot["devices"]] == [0, 1]
    assert snapshot["killed"] is True and 3.0 <= snapshot["waited"] < 10
    assert 3.0 <= took < 10


@needs_cc
@pytest.mark.parametrize(
    ("state", "stage"),
    [
        ("hang.nvmlInit = sleep\n", "init"),
        ("hang.nvmlDeviceGetCount = sleep\n", "count"),
        ("gpu0.hang.nvmlDeviceGetNvLinkState = sleep\n", "gpu0 nvlinks"),
    ],
)
def test_a_hang_of_the_whole_library(collect: Collect, state: str, stage: str) -> None:
    snapshot, _ = collect(state, 3.0)
    assert snapshot["hung"] is True and snapshot["stage"].startswith(f"{stage} (state S")
    assert snapshot["killed"] is True


@needs_cc
@pytest.mark.parametrize(
    "error", ["NVML_ERROR_DRIVER_NOT_LOADED", "NVML_ERROR_LIB_RM_VERSION_MISMATCH"]
)
def test_a_start_that_fails_has_nvmls_own_name(collect: Collect, error: str) -> None:
    snapshot, _ = collect(f"init = {error}\n")
    assert snapshot["error"] == error and snapshot["stage"] == "init" and not snapshot["hung"]


@pytest.mark.skipif(bool(find_library("nvidia-ml")), reason="this machine has an NVML")
def test_without_the_library_it_says_so(tmp_path: Path) -> None:
    snapshot, _ = collect_elsewhere(tmp_path)
    assert (snapshot["error"], snapshot["stage"]) == ("no-library", "init")
    assert snapshot["devices"] == []


def test_a_library_that_cannot_be_loaded_is_none(tmp_path: Path) -> None:
    (tmp_path / fake_nvml.LIBRARY).write_bytes(b"torn")
    snapshot, _ = collect_elsewhere(tmp_path)
    assert (snapshot["error"], snapshot["stage"]) == ("no-library", "init")
