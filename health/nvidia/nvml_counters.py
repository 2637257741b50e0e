"""The error counters of this node's GPUs, one line of JSON for each GPU: a process of its own.

robust-task starts it as the job's user, because a call of NVML may never return. A counter that
the board, the driver or the user's rights do not give is left out: absent is not zero.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from health.nvidia.nvml_ask import Asker, Gone, pci_address
from health.nvidia.nvml_links import count_errors, states

_HEAT = 1  # NVML_PERF_POLICY_THERMAL
_NS = 10**9


def main() -> None:
    try:
        nv = importlib.import_module("pynvml")
    except ImportError:
        return
    for counters in read(nv):
        _say(counters)
    _say({})  # the end of the answer
    os._exit(0)  # to close the driver may take it a while


def _say(counters: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(counters) + "\n")
    sys.stdout.flush()


def read(nv: Any) -> Iterator[dict[str, int]]:
    """Yield the counters of each GPU that answers; nothing without a driver."""
    try:
        nv.nvmlInit()
        count = nv.nvmlDeviceGetCount()
    except nv.NVMLError:
        return
    for index in range(count):
        gpu = Asker(nv, lambda _kind, _value: None, index)
        found: dict[str, int] = {}
        try:
            gpu.open()
            name = f"GPU {pci_address(nv.nvmlDeviceGetPciInfo(gpu.handle).busId)}"
            _count(gpu, found)
        except (Gone, nv.NVMLError):
            if not found:
                continue  # lost, or without a name; counters read before the loss are kept
        if found:
            yield {f"{name} {what}": value for what, value in found.items()}


def _count(gpu: Asker, found: dict[str, int]) -> None:
    """Count for one GPU. Raises Gone when the GPU answers nothing more."""
    nv, h = gpu.nv, gpu.handle

    def keep(what: str, call: Callable[[], Any]) -> None:
        try:
            found[what] = int(call())
        except (nv.NVMLError, AttributeError) as err:
            gpu.failed(err)

    # Volatile counters: those over the board's life are stored on the board and slow to read.
    def ecc(kind: int) -> Callable[[], Any]:
        return lambda: nv.nvmlDeviceGetTotalEccErrors(h, kind, nv.NVML_VOLATILE_ECC)

    keep("uncorrected ECC errors", ecc(nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED))
    keep("corrected ECC errors", ecc(nv.NVML_MEMORY_ERROR_TYPE_CORRECTED))
    try:
        corrected, uncorrected, _, failed = nv.nvmlDeviceGetRemappedRows(h)
    except (nv.NVMLError, AttributeError) as err:
        gpu.failed(err)
    else:
        found["rows remapped after uncorrected errors"] = int(uncorrected)
        found["rows remapped after corrected errors"] = int(corrected)
        found["failed row remappings"] = int(bool(failed))
    keep("PCIe replays", lambda: nv.nvmlDeviceGetPcieReplayCounter(h))
    keep(
        "seconds slowed down by heat",
        lambda: nv.nvmlDeviceGetViolationStatus(h, _HEAT).violationTime // _NS,
    )
    links = states(gpu) or []
    for link in links:
        found[f"NVLink {link['link']} link_downed"] = int(not link["active"])
    count_errors(gpu, active := [link for link in links if link["active"]])
    for link in active:
        for kind, value in link.get("errors", {}).items():
            found[f"NVLink {link['link']} {kind} errors"] = value


if __name__ == "__main__":
    main()
