"""The collector against a fake driver library: the real pynvml, in a process of its own."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import pytest

from health import child, nvml, nvml_ask
from health.nvml import Collector
from health.snapshot import Snapshot
from health.stuck import Stuck
from lab import fake_nvml

ROOT = Path(__file__).parents[1]
COLLECT = """
import json, sys, time
from health.nvml import Collector
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
        cwd=ROOT,
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
    snapshot, took = collect(state, 1.5)
    assert snapshot["hung"] is True and snapshot["stage"].startswith("gpu2 ecc (state S")
    assert [device["index"] for device in snapshot["devices"]] == [0, 1]
    assert snapshot["killed"] is True and 1.5 <= snapshot["waited"] < 5
    assert 1.5 <= took < 5


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
    snapshot, _ = collect(state, 1.0)
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


def test_without_pynvml_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes its import fail
    assert Collector(20.0).wait()["error"] == "no-pynvml"


def test_where_no_gpu_is_wanted_nvml_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    snapshot = Collector(20.0, needed=lambda: False).wait()
    assert (snapshot["stage"], snapshot["error"], snapshot["devices"]) == ("done", "", [])
    assert Collector(20.0, needed=lambda: True).wait()["error"] == "no-pynvml"


def test_what_decides_whether_nvml_is_asked_may_hang_as_well() -> None:
    snapshot = Collector(0.5, needed=lambda: bool(time.sleep(3600))).wait()
    assert snapshot["hung"] and snapshot["stage"].startswith("slurm.conf (state S")


def _writes(*lines: object) -> Callable[[int, object], None]:
    def work(fd: int, needed: object) -> None:
        for line in lines:
            child.write_all(fd, json.dumps(line).encode() + b"\n")

    return work


def test_a_collector_that_dies_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(fd: int, needed: object) -> None:
        _writes(["stage", "gpu0 ecc"])(fd, needed)
        os.kill(os.getpid(), 11)

    monkeypatch.setattr(nvml, "_collect", work)
    snapshot = Collector(20.0).wait()
    assert (snapshot["error"], snapshot["stage"], snapshot["hung"]) == (
        "died-signal-11",
        "gpu0 ecc",
        False,
    )


def test_a_collector_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_collect", _writes(["stage", "gpu0 ecc"]))
    assert Collector(20.0).wait()["error"] == "died-exit-0"


def test_answers_without_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(fd: int, needed: object) -> None:
        while True:
            child.write_all(fd, b"x" * 65536)

    monkeypatch.setattr(nvml, "_collect", work)
    assert Collector(20.0).wait()["error"] == "too-many-answers"


def test_what_cannot_be_killed_is_remembered_and_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def work(fd: int, needed: object) -> None:
        _writes(["stage", "gpu3 ecc"])(fd, needed)
        time.sleep(60)

    stuck = Stuck(str(tmp_path / "stuck"))
    monkeypatch.setattr(nvml, "_collect", work)
    with monkeypatch.context() as held:
        held.setattr(child.Child, "stop", lambda self, grace_s=0.05: False)
        first = Collector(1.0, stuck)
        first.dies_s = 0.2
        pid = first._child.pid  # type: ignore[union-attr]
        snapshot: Snapshot = first.wait()
    assert snapshot["hung"] and snapshot["stage"].startswith("gpu3 ecc (state S")
    assert snapshot["killed"] is False and snapshot["waited"] >= 1.0
    again = Collector(20.0, stuck)
    assert again.done and again.snapshot["hung"] and again.snapshot["killed"] is False
    assert again.snapshot["stage"].startswith("gpu3 ecc") and str(pid) in again.snapshot["stage"]
    assert first._child.stop(5.0)  # type: ignore[union-attr]
    monkeypatch.setattr(nvml, "_collect", _writes(["stage", "done"]))
    assert Collector(20.0, stuck).wait()["stage"] == "done"


@pytest.mark.parametrize("says", [False, True])
def test_what_dies_late_was_only_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: bool
) -> None:
    """The driver lets go of the killed process only when it has started the GPU."""

    def work(fd: int, needed: object) -> None:
        def meanwhile(*_: object) -> None:
            if says:
                _writes(["stage", "done"])(fd, needed)
            else:
                os.close(fd)  # as the kernel may, before it closes the driver's files

        signal.signal(signal.SIGUSR1, meanwhile)
        _writes(["stage", "init"])(fd, needed)
        time.sleep(60)

    def stop(self: child.Child, grace_s: float = 0.05) -> bool:
        os.kill(self.pid, signal.SIGUSR1)
        threading.Timer(1.0, os.kill, (self.pid, 9)).start()
        return False

    stuck = Stuck(str(tmp_path / "stuck"))
    monkeypatch.setattr(nvml, "_collect", work)
    monkeypatch.setattr(child.Child, "stop", stop)
    collector = Collector(1.0, stuck)
    snapshot = collector.wait()
    assert (snapshot["hung"], snapshot["killed"]) == (True, True)
    assert snapshot["stage"].startswith("init (state S")
    assert stuck.still("nvml") == "" and snapshot["devices"] == []


def test_what_does_not_die_is_left_behind_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def stop(self: child.Child, grace_s: float = 0.05) -> bool:
        pids.append(self.pid)
        return False

    monkeypatch.setattr(nvml, "_collect", lambda fd, needed: time.sleep(60))
    monkeypatch.setattr(child.Child, "stop", stop)
    collector = Collector(0.5)
    collector.limit = time.monotonic() + 1.0
    assert collector.wait()["killed"] is False
    assert time.monotonic() - collector.limit < 5  # and not dies_s later
    collector.close()
    other = Collector(60.0)
    other.close()  # the run is over before the deadline
    assert (other.done, other.snapshot["hung"], other.snapshot["killed"]) == (True, True, False)
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_child_holds_nothing_of_its_parent_open() -> None:
    """slurmd reads a prolog's output to its end: a hung child must not keep it open."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    stuck_child = child.fork(lambda fd: (child.write_all(fd, b"x"), time.sleep(60))[0], 60.0)
    try:
        os.close(write_end)
        poll = select.poll()
        poll.register(stuck_child.fd, select.POLLIN)
        assert poll.poll(10_000)  # it runs
        poll = select.poll()
        poll.register(read_end, select.POLLIN)
        assert poll.poll(10_000) and os.read(read_end, 1) == b""
        assert os.getsid(stuck_child.pid) == stuck_child.pid
        for fd in (0, 1, 2):
            assert Path(f"/proc/{stuck_child.pid}/fd/{fd}").readlink() == Path(os.devnull)
    finally:
        stuck_child.stop(5.0)
        stuck_child.close()
        os.close(read_end)


def test_a_child_ends_by_itself_when_its_parent_has_gone() -> None:
    alone = child.fork(lambda fd: time.sleep(60), -child._SPARE_S + 0.2)
    assert alone.ended(10.0) == -14  # SIGALRM
    alone.close()


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        (b"00000008:01:00.0", "0008:01:00.0"),
        ("00010000:3B:00.0", "10000:3b:00.0"),
        ("", ""),
    ],
)
def test_pci_addresses_are_the_kernels(bus_id: object, address: str) -> None:
    assert nvml_ask.pci_address(bus_id) == address


def test_the_list_of_fields_is_pynvmls() -> None:
    """Numbers kept for older pynvml agree with the one that is installed."""
    import pynvml

    from health import nvml_links, nvml_query

    for mine, name in (
        (nvml_query._FIELD_RECOVERY_ACTION, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        (nvml_query._FIELD_MEMORY_TEMPERATURE, "NVML_FI_DEV_MEMORY_TEMP"),
        (nvml_query._FIELD_SHUTDOWN_TLIMIT, "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT"),
        (nvml_query._FIELD_SLOWDOWN_TLIMIT, "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT"),
        (nvml_links._FIELD_LINK_COUNT, "NVML_FI_DEV_NVLINK_LINK_COUNT"),
        (nvml_links._DATA_LINK["replay"][0], "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY"),
        (nvml_links._DATA_LINK["recovery"][0], "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY"),
        (nvml_links._DATA_LINK["crc_flit"][0], "NVML_FI_DEV_NVLINK_ERROR_DL_CRC"),
        (
            nvml_links._NVLINK5["recovery"][0],
            "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
        ),
        (
            nvml_links._NVLINK5["fatal"][0],
            "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
        ),
    ):
        assert getattr(pynvml, name) == mine, name
    for mine, name in nvml_query._COMPUTE_MODES.items():
        if name != "exclusive_thread":
            assert getattr(pynvml, f"NVML_COMPUTEMODE_{name.upper()}") == mine
    for mine, name in nvml_links._FABRIC_STATES.items():
        assert getattr(pynvml, f"NVML_GPU_FABRIC_STATE_{name.upper()}") == mine
