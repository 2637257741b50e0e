"""The process that asks NVML for gpu_use.py.

It prints ``[index, processes, MIG, error]`` for each GPU.
"""

from __future__ import annotations

import importlib
import json
from functools import partial

from health.nvidia.nvml_ask import Asker, Gone

_PROCESSES = 256  # of one GPU


def main() -> None:
    try:
        nv = importlib.import_module("pynvml")
    except ImportError:
        return
    try:
        nv.nvmlInit()
        count = nv.nvmlDeviceGetCount()
    except nv.NVMLError:
        return
    for index in range(count):
        gpu = Asker(nv, lambda kind, value: None, index)
        try:
            gpu.open()
            gpu.one("mig", partial(_mig, gpu))
            gpu.one("processes", partial(_processes, gpu))
        except Gone as err:
            print(json.dumps([index, [], 0, str(err)]), flush=True)
            continue
        known = gpu.device
        print(json.dumps([index, known.get("processes", []), known.get("mig", 0), ""]), flush=True)


def _mig(gpu: Asker) -> int:
    return int(gpu.nv.nvmlDeviceGetMigMode(gpu.handle)[0])


def _processes(gpu: Asker) -> list[int]:
    nv = gpu.nv
    found = gpu.newest(
        nv.nvmlDeviceGetComputeRunningProcesses_v3, nv.nvmlDeviceGetComputeRunningProcesses_v2
    )
    return [int(process.pid) for process in found[:_PROCESSES]]


if __name__ == "__main__":
    main()
