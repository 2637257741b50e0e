"""The queries to NVML: all that health/node/gpu_snapshot.py names, through the real ``pynvml``."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from typing import Any

from health.nvidia.nvml_ask import NOT_SUPPORTED, Asker, Gone, Say, error_name, pci_address
from health.nvidia.nvml_links import fabric, nvlinks

_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_PROCESS_LIMIT = 256  # of one GPU

# Numbers of nvml.h that older pynvml does not name.
_FIELD_RECOVERY_ACTION = 230
_FIELD_MEMORY_TEMPERATURE = 82
_FIELD_SHUTDOWN_TLIMIT = 193
_FIELD_SLOWDOWN_TLIMIT = 194


def ask(nv: Any, say: Say) -> None:
    """Say all about all GPUs, bit by bit: "stage", "top", "device", "lost", "error"."""
    say("stage", "init")
    try:
        nv.nvmlInit()
        say("stage", "count")
        count = nv.nvmlDeviceGetCount()
    except nv.NVMLError as err:
        found = err.value != nv.NVML_ERROR_LIBRARY_NOT_FOUND
        say("error", error_name(nv, err) if found else "no-library")
        return
    say("stage", "versions")
    cuda = _text(nv, nv.nvmlSystemGetCudaDriverVersion_v2)
    say(
        "top",
        {
            "count": count,
            "driver": _text(nv, nv.nvmlSystemGetDriverVersion),
            "nvml": _text(nv, nv.nvmlSystemGetNVMLVersion),
            "cuda": f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}" if cuda else "",
        },
    )
    for index in range(count):
        gpu = Asker(nv, say, index)
        try:
            gpu.open()
            _everything(gpu)
        except Gone as err:
            say("lost", {"index": index, "pci": gpu.device.get("pci", ""), "error": str(err)})
        else:
            say("device", gpu.device)
    say("stage", "done")


def _text(nv: Any, call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except nv.NVMLError:
        return ""


def _everything(gpu: Asker) -> None:
    nv, h = gpu.nv, gpu.handle
    gpu.one("pci", lambda: pci_address(nv.nvmlDeviceGetPciInfo(h).busId))
    gpu.one("uuid", lambda: nv.nvmlDeviceGetUUID(h))
    gpu.one("serial", lambda: nv.nvmlDeviceGetSerial(h))
    gpu.one("name", lambda: nv.nvmlDeviceGetName(h))
    gpu.one("vbios", lambda: nv.nvmlDeviceGetVbiosVersion(h))
    gpu.one("recovery_action", lambda: int(gpu.field(_FIELD_RECOVERY_ACTION)))
    gpu.one("persistence", lambda: bool(nv.nvmlDeviceGetPersistenceMode(h)))
    gpu.one("compute_mode", lambda: _compute_mode(nv.nvmlDeviceGetComputeMode(h)))
    _mig(gpu)
    # In this order: what a process gives back in between is not memory that nobody has.
    gpu.one("processes", lambda: _processes(gpu))
    gpu.one("memory", lambda: _memory(gpu))
    _ecc(gpu)
    _remap(gpu)
    gpu.group(
        "retired",
        {
            "single": lambda: len(nv.nvmlDeviceGetRetiredPages(h, 0)),
            "double": lambda: len(nv.nvmlDeviceGetRetiredPages(h, 1)),
            "pending": lambda: bool(nv.nvmlDeviceGetRetiredPagesPendingStatus(h)),
        },
    )
    gpu.one("throttle", lambda: _throttle(gpu))
    _clocks(gpu)
    _temperature(gpu)
    gpu.group(
        "power",
        {
            "draw": lambda: nv.nvmlDeviceGetPowerUsage(h) / 1000,
            "limit": lambda: nv.nvmlDeviceGetPowerManagementLimit(h) / 1000,
            "default_limit": lambda: nv.nvmlDeviceGetPowerManagementDefaultLimit(h) / 1000,
            "enforced_limit": lambda: nv.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
        },
    )
    gpu.group(
        "pcie",
        {
            "generation": lambda: nv.nvmlDeviceGetCurrPcieLinkGeneration(h),
            "max_generation": lambda: nv.nvmlDeviceGetMaxPcieLinkGeneration(h),
            "width": lambda: nv.nvmlDeviceGetCurrPcieLinkWidth(h),
            "max_width": lambda: nv.nvmlDeviceGetMaxPcieLinkWidth(h),
            "replays": lambda: nv.nvmlDeviceGetPcieReplayCounter(h),
        },
    )
    nvlinks(gpu)
    gpu.one("fabric", lambda: fabric(gpu))


def _compute_mode(mode: int) -> str:
    return _COMPUTE_MODES.get(mode, str(mode))


def _mig(gpu: Asker) -> None:
    gpu.stage("mig")
    try:
        now, pending = gpu.nv.nvmlDeviceGetMigMode(gpu.handle)
    except (gpu.nv.NVMLError, AttributeError) as err:
        gpu.refused("mig", err)
    else:
        gpu.device["mig"] = bool(now)
        gpu.device["mig_pending"] = bool(pending)


def _memory(gpu: Asker) -> dict[str, int]:
    nv = gpu.nv
    info = gpu.newest(
        lambda h: nv.nvmlDeviceGetMemoryInfo(h, version=nv.nvmlMemory_v2),
        nv.nvmlDeviceGetMemoryInfo,  # here "used" has the driver's reserve in it
    )
    return {"total": int(info.total), "used": int(info.used)}


def _processes(gpu: Asker) -> list[dict[str, Any]]:
    nv = gpu.nv
    compute = gpu.newest(
        nv.nvmlDeviceGetComputeRunningProcesses_v3, nv.nvmlDeviceGetComputeRunningProcesses_v2
    )
    try:
        graphics = gpu.newest(
            nv.nvmlDeviceGetGraphicsRunningProcesses_v3,
            nv.nvmlDeviceGetGraphicsRunningProcesses_v2,
        )
    except nv.NVMLError as err:
        if gpu.failed(err) != NOT_SUPPORTED:
            raise
        graphics = []
    out: dict[int, dict[str, Any]] = {}
    for kind, found in (("compute", compute), ("graphics", graphics)):
        for process in found[:_PROCESS_LIMIT]:
            entry: dict[str, Any] = {"pid": int(process.pid), "kind": kind}
            if process.usedGpuMemory is not None:
                entry["memory"] = int(process.usedGpuMemory)
            out.setdefault(entry["pid"], entry)
    return list(out.values())


def _ecc(gpu: Asker) -> None:
    nv, h = gpu.nv, gpu.handle

    def total(kind: int, counter: int) -> Callable[[], int]:
        return lambda: int(nv.nvmlDeviceGetTotalEccErrors(h, kind, counter))

    def threshold() -> bool:
        status = nv.c_nvmlEccSramErrorStatus_v1_t()
        nv.nvmlDeviceGetSramEccErrorStatus(h, byref(status))
        return bool(status.bThresholdExceeded)

    gpu.group(
        "ecc",
        {
            "enabled": lambda: bool(nv.nvmlDeviceGetCurrentEccMode(h)),
            "pending": lambda: bool(nv.nvmlDeviceGetPendingEccMode(h)),
            "volatile_corrected": total(nv.NVML_MEMORY_ERROR_TYPE_CORRECTED, nv.NVML_VOLATILE_ECC),
            "volatile_uncorrected": total(
                nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_VOLATILE_ECC
            ),
            "aggregate_corrected": total(
                nv.NVML_MEMORY_ERROR_TYPE_CORRECTED, nv.NVML_AGGREGATE_ECC
            ),
            "aggregate_uncorrected": total(
                nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_AGGREGATE_ECC
            ),
            "sram_threshold_exceeded": threshold,
        },
    )


def _remap(gpu: Asker) -> None:
    nv, h = gpu.nv, gpu.handle
    parts = gpu.group(
        "remap",
        {
            "rows": lambda: nv.nvmlDeviceGetRemappedRows(h),
            "spare_none": lambda: int(nv.nvmlDeviceGetRowRemapperHistogram(h).none),
        },
    )
    if "rows" in parts:
        corrected, uncorrected, pending, failed = parts.pop("rows")
        parts.update(
            corrected=corrected,
            uncorrected=uncorrected,
            pending=bool(pending),
            failed=bool(failed),
        )


def _throttle(gpu: Asker) -> int:
    nv = gpu.nv
    old = nv.nvmlDeviceGetCurrentClocksThrottleReasons
    return int(gpu.newest(getattr(nv, "nvmlDeviceGetCurrentClocksEventReasons", old), old))


def _clocks(gpu: Asker) -> None:
    nv, h = gpu.nv, gpu.handle

    def clock(call: str, kind: int) -> Callable[[], int]:
        return lambda: int(getattr(nv, call)(h, kind))

    parts = {}
    for prefix, call in (
        ("", "nvmlDeviceGetClockInfo"),
        ("max_", "nvmlDeviceGetMaxClockInfo"),
        ("app_", "nvmlDeviceGetApplicationsClock"),
        ("default_app_", "nvmlDeviceGetDefaultApplicationsClock"),
    ):
        parts[prefix + "sm"] = clock(call, nv.NVML_CLOCK_SM)
        parts[prefix + "memory"] = clock(call, nv.NVML_CLOCK_MEM)
    gpu.group("clocks", parts)


def _temperature(gpu: Asker) -> None:
    nv, h = gpu.nv, gpu.handle
    call = getattr(nv, "nvmlDeviceGetTemperatureV", nv.nvmlDeviceGetTemperature)

    def now() -> int:
        sensor = nv.NVML_TEMPERATURE_GPU
        return int(
            gpu.newest(lambda h: call(h, sensor), lambda h: nv.nvmlDeviceGetTemperature(h, sensor))
        )

    def threshold(kind: int) -> Callable[[], int]:
        return lambda: int(nv.nvmlDeviceGetTemperatureThreshold(h, kind))

    values = gpu.group(
        "temperature",
        {
            "gpu": now,
            "memory": lambda: int(gpu.field(_FIELD_MEMORY_TEMPERATURE)),
            "slowdown": threshold(nv.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            "shutdown": threshold(nv.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
            "memory_max": threshold(nv.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
        },
    )
    if "gpu" in values and "slowdown" not in values:
        _margins(gpu, values)


def _margins(gpu: Asker, values: dict[str, Any]) -> None:
    """Compute the thresholds from T.Limit, which newer boards report instead (Hopper and later).

    T.Limit counts down to 0 at the highest operating temperature; slowdown and shutdown lie at
    negative margins (-2, -8): threshold = gpu + margin - limit. Source: nvml.h, T.Limit fields.
    Healthy boards have reported margins of 0 and below (github.com/leptonai/gpud, pull request
    1208), of the core or of the memory, which is not documented (1186): they give no threshold.
    A GPU that is too hot slows down, which gpu_clocks reports.
    """
    try:
        margin = int(gpu.nv.nvmlDeviceGetMarginTemperature(gpu.handle))
        if margin <= 0:
            return
        limits = gpu.fields(_FIELD_SLOWDOWN_TLIMIT, _FIELD_SHUTDOWN_TLIMIT)
        for key, limit in zip(("slowdown", "shutdown"), limits, strict=True):
            values[key] = values["gpu"] + margin - int(gpu.checked(limit))
            gpu.device["errors"].pop(f"temperature.{key}", None)
    except (gpu.nv.NVMLError, AttributeError) as err:
        gpu.failed(err)  # the thresholds' own errors stand
