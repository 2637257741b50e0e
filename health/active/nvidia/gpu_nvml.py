"""The process that reads or sets the GPUs' state over NVML for gpu_state.py; prints JSON lines.

Lines are ``[kind, value]``: "stage" (what is asked next: where it hangs, if it does), "gpu",
"lost" ([index, error]), "failed" (a setting that was refused), "error" (nothing can be asked).
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from health.nvidia.nvml_ask import Asker, Gone, error_name

_PROCESSES = 256  # of one GPU


def main(verb: str, order: str) -> None:
    _say("stage", "import of pynvml")
    try:
        nv = importlib.import_module("pynvml")
    except ImportError:
        _say("error", "no-pynvml")
        _say("stage", "done")
        return
    _say("stage", "init")
    try:
        nv.nvmlInit()
        count = nv.nvmlDeviceGetCount()
    except nv.NVMLError as err:
        found = err.value != nv.NVML_ERROR_LIBRARY_NOT_FOUND
        _say("error", error_name(nv, err) if found else "no-library")
    else:
        if verb == "put":
            _put(nv, json.loads(order))
        else:
            _take(nv, count)
    _say("stage", "done")


def _say(kind: str, value: Any) -> None:
    print(json.dumps([kind, value]), flush=True)


def _take(nv: Any, count: int) -> None:
    for index in range(count):
        gpu = Asker(nv, _say, index)
        try:
            gpu.open()
            _everything(gpu)
        except Gone as err:
            _say("lost", [index, str(err)])
        else:
            _say("gpu", gpu.device)


def _everything(gpu: Asker) -> None:
    nv, h = gpu.nv, gpu.handle
    gpu.one("uuid", lambda: nv.nvmlDeviceGetUUID(h))
    gpu.one("app_sm", lambda: int(nv.nvmlDeviceGetApplicationsClock(h, nv.NVML_CLOCK_SM)))
    gpu.one("app_memory", lambda: int(nv.nvmlDeviceGetApplicationsClock(h, nv.NVML_CLOCK_MEM)))
    gpu.one("power_limit", lambda: int(nv.nvmlDeviceGetPowerManagementLimit(h)))
    gpu.one("enforced_limit", lambda: int(nv.nvmlDeviceGetEnforcedPowerLimit(h)))
    gpu.one("persistence", lambda: int(nv.nvmlDeviceGetPersistenceMode(h)))
    gpu.one("compute_mode", lambda: int(nv.nvmlDeviceGetComputeMode(h)))
    gpu.one("mig", lambda: int(nv.nvmlDeviceGetMigMode(h)[0]))
    gpu.one("mig_pending", lambda: int(nv.nvmlDeviceGetMigMode(h)[1]))
    gpu.one("ecc", lambda: int(nv.nvmlDeviceGetCurrentEccMode(h)))
    gpu.one("ecc_pending", lambda: int(nv.nvmlDeviceGetPendingEccMode(h)))
    gpu.one("processes", lambda: _processes(gpu))


def _processes(gpu: Asker) -> list[int]:
    nv = gpu.nv
    found = gpu.newest(
        nv.nvmlDeviceGetComputeRunningProcesses_v3, nv.nvmlDeviceGetComputeRunningProcesses_v2
    )
    return [int(process.pid) for process in found[:_PROCESSES]]


def _put(nv: Any, orders: list[tuple[str, str, list[int]]]) -> None:
    for uuid, call, args in orders:
        _say("stage", f"{uuid} {call}")
        try:
            getattr(nv, call)(nv.nvmlDeviceGetHandleByUUID(uuid.encode()), *args)
        except (nv.NVMLError, AttributeError) as err:
            why = error_name(nv, err) if isinstance(err, nv.NVMLError) else "this pynvml is older"
            _say("failed", f"{call}({', '.join(map(str, args))}) of {uuid}: {why}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
