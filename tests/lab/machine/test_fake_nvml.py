"""The fake NVML of the lab under the real pynvml: what it says, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from lab.errors import LabError
from lab.machine import fake_nvml

pytest.importorskip("pynvml")

CALLS = """
Init Shutdown InitWithFlags ErrorString SystemGetDriverVersion SystemGetNVMLVersion
SystemGetCudaDriverVersion_v2 DeviceGetCount_v2 DeviceGetHandleByIndex_v2 DeviceGetPciInfo_v3
DeviceGetUUID DeviceGetSerial DeviceGetName DeviceGetVbiosVersion DeviceGetPersistenceMode
DeviceGetComputeMode DeviceGetMigMode DeviceGetMemoryInfo_v2 DeviceGetMemoryInfo
DeviceGetComputeRunningProcesses_v3 DeviceGetComputeRunningProcesses_v2
DeviceGetGraphicsRunningProcesses_v3 DeviceGetGraphicsRunningProcesses_v2 DeviceGetEccMode
DeviceGetTotalEccErrors DeviceGetSramEccErrorStatus DeviceGetRemappedRows
DeviceGetRowRemapperHistogram DeviceGetRetiredPages DeviceGetRetiredPagesPendingStatus
DeviceGetFieldValues DeviceGetCurrentClocksEventReasons DeviceGetCurrentClocksThrottleReasons
DeviceGetClockInfo DeviceGetMaxClockInfo DeviceGetApplicationsClock
DeviceGetDefaultApplicationsClock DeviceGetTemperatureV DeviceGetTemperature
DeviceGetTemperatureThreshold DeviceGetMarginTemperature DeviceGetPowerUsage
DeviceGetPowerManagementLimit DeviceGetPowerManagementDefaultLimit DeviceGetEnforcedPowerLimit
DeviceGetCurrPcieLinkGeneration DeviceGetMaxPcieLinkGeneration DeviceGetCurrPcieLinkWidth
DeviceGetMaxPcieLinkWidth DeviceGetPcieReplayCounter DeviceGetNvLinkState DeviceGetNvLinkVersion
DeviceGetNvLinkRemotePciInfo_v2 DeviceGetNvLinkErrorCounter DeviceGetGpuFabricInfoV
DeviceGetGpuFabricInfo
"""

# Evaluates expressions, each after nvmlInit; a failure is the name of NVML's error.
_DRIVER = """
import json, sys
import pynvml as N
names = {v: k for k, v in vars(N).items() if k.startswith("NVML_ERROR_") and isinstance(v, int)}
def h(i): return N.nvmlDeviceGetHandleByIndex(i)
def fabric(i, kind):
    info = kind()
    N.nvmlDeviceGetGpuFabricInfoV(h(i), N.byref(info))
    return [info.state, info.status, info.healthMask]
def sram(i, version=None):
    info = N.c_nvmlEccSramErrorStatus_v1_t()
    if version: info.version = version
    N.nvmlDeviceGetSramEccErrorStatus(h(i), N.byref(info))
    return info.bThresholdExceeded
def field(i, *ids):
    out = []
    for value in N.nvmlDeviceGetFieldValues(h(i), ids):
        out.append(names.get(value.nvmlReturn) or value.value.sllVal)
    return out
answers = []
for text in json.load(sys.stdin):
    try:
        N.nvmlInit()
        answers.append(eval(text))
    except N.NVMLError as error:
        answers.append(names[error.value])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fake_nvml.build(tmp_path_factory.mktemp("nvml"))
    except LabError as error:
        pytest.skip(str(error))


@pytest.fixture
def state(library: Path) -> Iterator[Path]:
    path = library.with_name("nvml.state")
    yield path
    path.unlink(missing_ok=True)


def start(library: Path) -> subprocess.Popen[str]:
    environ = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    return subprocess.Popen(
        [sys.executable, "-c", _DRIVER],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(library: Path, *texts: str) -> list[Any]:
    with start(library) as process:
        out, _ = process.communicate(json.dumps(texts), timeout=30)
    answers: list[Any] = json.loads(out)
    return answers


def test_has_every_call_of_the_collector(library: Path) -> None:
    # In a process of its own: once loaded, a library of this name is found by all who look.
    text = f"[name for name in {CALLS.split()} if not hasattr(N.nvmlLib, f'nvml{{name}}')]"
    assert ask(library, text) == [[]]


HEALTHY: list[tuple[str, object]] = [
    ("N.nvmlDeviceGetCount()", 8),
    ("N.nvmlSystemGetDriverVersion()", "570.133.20"),
    ("N.nvmlSystemGetNVMLVersion()", "12.570.133.20"),
    ("N.nvmlSystemGetCudaDriverVersion_v2()", 12080),
    ("N.nvmlDeviceGetName(h(0))", "NVIDIA H100 80GB HBM3"),
    ("N.nvmlDeviceGetPciInfo(h(0)).busId", "00000000:1B:00.0"),
    ("len({N.nvmlDeviceGetUUID(h(i)) for i in range(8)})", 8),
    ("len({N.nvmlDeviceGetSerial(h(i)) for i in range(8)})", 8),
    ("len({N.nvmlDeviceGetPciInfo(h(i)).busId for i in range(8)})", 8),
    ("N.nvmlDeviceGetVbiosVersion(h(7))", "96.00.99.00.01"),
    ("N.nvmlDeviceGetPersistenceMode(h(0))", 1),
    ("N.nvmlDeviceGetComputeMode(h(0))", 0),
    ("N.nvmlDeviceGetMigMode(h(0))", [0, 0]),
    ("N.nvmlDeviceGetMemoryInfo(h(0), N.nvmlMemory_v2).total >> 30", 79),
    ("N.nvmlDeviceGetMemoryInfo(h(0)).total >> 30", 79),
    ("N.nvmlDeviceGetComputeRunningProcesses(h(0))", []),
    ("N.nvmlDeviceGetEccMode(h(0))", [1, 1]),
    ("[N.nvmlDeviceGetTotalEccErrors(h(0), t, c) for t in (0, 1) for c in (0, 1)]", [0] * 4),
    ("sram(0)", 0),
    ("sram(0, 1)", "NVML_ERROR_ARGUMENT_VERSION_MISMATCH"),
    ("N.nvmlDeviceGetRemappedRows(h(0))", [0, 0, 0, 0]),
    ("N.nvmlDeviceGetRowRemapperHistogram(h(0)).max", 2560),
    ("N.nvmlDeviceGetRetiredPages(h(0), 1)", "NVML_ERROR_NOT_SUPPORTED"),
    ("N.nvmlDeviceGetCurrentClocksEventReasons(h(0))", 1),
    ("N.nvmlDeviceGetMaxClockInfo(h(0), N.NVML_CLOCK_SM)", 1980),
    ("N.nvmlDeviceGetTemperatureV(h(0), 0)", 34),
    ("N.nvmlDeviceGetTemperature(h(0), 0)", 34),
    ("[N.nvmlDeviceGetTemperatureThreshold(h(0), i) for i in range(3)]", [92, 89, 95]),
    ("N.nvmlDeviceGetMarginTemperature(h(0))", 53),
    ("N.nvmlDeviceGetEnforcedPowerLimit(h(0))", 700000),
    ("N.nvmlDeviceGetCurrPcieLinkGeneration(h(0))", 5),
    ("N.nvmlDeviceGetCurrPcieLinkWidth(h(0))", 16),
    ("sum(N.nvmlDeviceGetNvLinkState(h(0), i) for i in range(18))", 18),
    ("N.nvmlDeviceGetNvLinkState(h(0), 18)", "NVML_ERROR_INVALID_ARGUMENT"),
    ("N.nvmlDeviceGetNvLinkErrorCounter(h(0), 17, 0)", 0),
    ("N.nvmlDeviceGetNvLinkRemotePciInfo(h(0), 0).busId", "00000000:05:00.0"),
    ("fabric(0, N.c_nvmlGpuFabricInfo_v2_t)", [3, 0, 0]),
    ("fabric(0, N.c_nvmlGpuFabricInfo_v3_t)", [3, 0, 0]),
    ("field(0, 230, 82, 193, 91, 9999)", [0, 44, -8, 18, "NVML_ERROR_NOT_SUPPORTED"]),
    ("h(8)", "NVML_ERROR_INVALID_ARGUMENT"),
]


def test_healthy_by_default(library: Path, state: Path) -> None:
    assert not state.exists()
    answers = ask(library, *(text for text, _ in HEALTHY))
    assert dict(zip([t for t, _ in HEALTHY], answers, strict=True)) == dict(HEALTHY)


NAMES = "[N.nvmlDeviceGetUUID(h(i))[-1] for i in range(N.nvmlDeviceGetCount())]"
ECC = "[N.nvmlDeviceGetTotalEccErrors(h(i), 1, 0) for i in range(3)]"
STATES = "[N.nvmlDeviceGetNvLinkState(h(0), i) for i in range(5)]"


@pytest.mark.parametrize(
    ("lines", "text", "expected"),
    [
        ("count=2", "N.nvmlDeviceGetCount()", 2),
        ("# gpu1.x\n\n gpu1.ecc.volatile_uncorrected = 7 # seven", ECC, [0, 7, 0]),
        ("gpu.ecc.volatile_uncorrected=1\ngpu2.ecc.volatile_uncorrected=0x10", ECC, [1, 1, 16]),
        ("gpu0.temperature.gpu=20\ngpu0.temperature.gpu=95",
         "[N.nvmlDeviceGetTemperatureV(h(0), 0), N.nvmlDeviceGetMarginTemperature(h(0))]",
         [95, -8]),
        ("driver=1.2\ncuda=13000", "[N.nvmlSystemGetDriverVersion(), "
         "N.nvmlSystemGetNVMLVersion(), N.nvmlSystemGetCudaDriverVersion()]",
         ["1.2", "12.1.2", 13000]),
        ("gpu0.nvlink3.active=0\ngpu0.nvlink.active=1", STATES, [1, 1, 1, 0, 1]),
        ("gpu0.nvlink3.active=0", "N.nvmlDeviceGetNvLinkVersion(h(0), 3)",
         "NVML_ERROR_NOT_SUPPORTED"),
        ("gpu0.nvlink.count=0", "N.nvmlDeviceGetNvLinkState(h(0), 0)", "NVML_ERROR_NOT_SUPPORTED"),
        ("gpu0.nvlink2.replay=5", "[N.nvmlDeviceGetNvLinkErrorCounter(h(0), i, 0) "
         "for i in range(4)]", [0, 0, 5, 0]),
        ("gpu0.nvlink2.field.213=9", "field(0, (213, 2), (213, 1))",
         [9, "NVML_ERROR_NOT_SUPPORTED"]),
        ("gpu0.recovery_action=4", "field(0, 230) + field(1, 230)", [4, 0]),
        ("gpu0.remap.corrected=1\ngpu0.remap.uncorrected=2\ngpu0.remap.pending=1\n"
         "gpu0.remap.failed=1", "N.nvmlDeviceGetRemappedRows(h(0))", [1, 2, 1, 1]),
        ("gpu0.remap.none=2", "N.nvmlDeviceGetRowRemapperHistogram(h(0)).max", 2558),
        ("gpu0.retired.double=3", "len(N.nvmlDeviceGetRetiredPages(h(0), 1))", 3),
        ("gpu0.processes=7:1048576,9", "[[p.pid, p.usedGpuMemory] for p in "
         "N.nvmlDeviceGetComputeRunningProcesses(h(0))]", [[7, 1048576], [9, None]]),
        ("gpu0.fabric.state=2\ngpu0.fabric.status=NVML_ERROR_UNKNOWN\ngpu0.fabric.health=0x5",
         "fabric(0, N.c_nvmlGpuFabricInfo_v2_t)", [2, 999, 5]),
        ("gpu0.ecc.enabled=NVML_ERROR_NOT_SUPPORTED", "N.nvmlDeviceGetEccMode(h(0))",
         "NVML_ERROR_NOT_SUPPORTED"),
        ("init=NVML_ERROR_DRIVER_NOT_LOADED", "N.nvmlDeviceGetCount()",
         "NVML_ERROR_DRIVER_NOT_LOADED"),
        ("init=NVML_ERROR_LIB_RM_VERSION_MISMATCH", "1", "NVML_ERROR_LIB_RM_VERSION_MISMATCH"),
        ("gpu1.lost=handle", "[N.nvmlDeviceGetCount(), N.nvmlDeviceGetName(h(0))[:6]]",
         [8, "NVIDIA"]),
        ("gpu1.lost=handle", "h(1)", "NVML_ERROR_GPU_IS_LOST"),
        ("gpu1.lost=NVML_ERROR_UNKNOWN", "h(1)", "NVML_ERROR_UNKNOWN"),
        ("gpu1.lost=calls", "N.nvmlDeviceGetName(h(1))", "NVML_ERROR_GPU_IS_LOST"),
        ("count=3\ngpu1.lost=absent", NAMES, ["0", "2"]),
        ("error.nvmlDeviceGetMemoryInfo=NVML_ERROR_UNKNOWN",
         "N.nvmlDeviceGetMemoryInfo(h(0), N.nvmlMemory_v2)", "NVML_ERROR_UNKNOWN"),
        ("gpu1.error.nvmlDeviceGetSerial=NVML_ERROR_TIMEOUT",
         "[N.nvmlDeviceGetSerial(h(0)) != '', N.nvmlDeviceGetSerial(h(1))]", "NVML_ERROR_TIMEOUT"),
    ],
)  # fmt: skip
def test_state_file(library: Path, state: Path, lines: str, text: str, expected: object) -> None:
    state.write_text(lines)
    assert ask(library, text) == [expected]


def test_state_is_read_again_at_each_init(library: Path, state: Path) -> None:
    state.write_text("count=1\n")
    write = f"open({str(state)!r}, 'w').write('count=3\\n') and N.nvmlDeviceGetCount()"
    assert ask(library, write, "N.nvmlDeviceGetCount()") == [1, 3]


@pytest.mark.parametrize("key", ["hang", "hang.nvmlDeviceGetCount", "gpu0.hang",
                                 "gpu0.hang.nvmlDeviceGetName"])  # fmt: skip
def test_hang_ends_by_nothing_but_sigkill(library: Path, state: Path, key: str) -> None:
    state.write_text(f"{key}=sleep\n")
    with start(library) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(["N.nvmlDeviceGetCount()", "N.nvmlDeviceGetName(h(0))"]))
        process.stdin.close()
        _wait_until_blocked(process)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        _wait_until_pending(process, signal.SIGTERM)
        assert process.poll() is None
        process.kill()
        assert process.wait(10) == -signal.SIGKILL


def _status(process: subprocess.Popen[str]) -> dict[str, str]:
    rows = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return dict(row.split(":\t", 1) for row in rows if ":\t" in row)


def _wait_until_blocked(process: subprocess.Popen[str]) -> None:
    until(lambda: _has(process, "SigBlk", signal.SIGTERM), "SIGTERM is blocked", 10)


def _wait_until_pending(process: subprocess.Popen[str], number: int) -> None:
    until(lambda: _has(process, "ShdPnd", number), f"signal {number} is pending", 10)


def _has(process: subprocess.Popen[str], mask: str, number: int) -> bool:
    return bool(int(_status(process)[mask], 16) & (1 << (number - 1)))


def test_hang_at_a_path_goes_on_when_the_path_answers(library: Path, state: Path) -> None:
    pipe = library.with_name("pipe")
    os.mkfifo(pipe)
    state.write_text(f"hang={pipe}\n")
    with start(library) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(["N.nvmlDeviceGetCount()"]))
        process.stdin.close()
        with pipe.open("w") as writer:  # waits until the library has opened the other end
            writer.write("x")
        assert process.stdout is not None
        assert json.loads(process.stdout.read()) == [8]
    pipe.unlink()


def test_no_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match="apt-get install gcc"):
        fake_nvml.build(tmp_path)
