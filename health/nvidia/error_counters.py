"""All GPUs' error counters as one JSON object: memory (ECC), PCIe replays, NVLink.

A program of its own, run by robust-task: NVML may hang, and is not to hold the job then.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from health.nvidia.nvml_ask import Asker, Gone, pci_address
from health.nvidia.nvml_links import nvlinks
from health.nvidia.nvml_query import ecc

_ECC = {"volatile_corrected": "corrected", "volatile_uncorrected": "uncorrected"}


def counters(device: Mapping[str, Any]) -> dict[str, int]:
    """The counters of a GPU by name, from what NVML has answered (pure)."""
    name = f"GPU {device.get('pci') or device['index']}"
    errors = device.get("ecc", {})
    out = {f"{name} {_ECC[key]} ECC errors": errors[key] for key in _ECC if key in errors}
    if "replays" in device.get("pcie", {}):
        out[f"{name} PCIe replays"] = device["pcie"]["replays"]
    for link in device.get("nvlinks", []):
        for kind, count in link.get("errors", {}).items():
            out[f"{name} NVLink {link['link']} {kind} errors"] = count
    return out


def _of(gpu: Asker) -> dict[str, int]:
    nv = gpu.nv
    try:
        gpu.open()
        gpu.one("pci", lambda: pci_address(nv.nvmlDeviceGetPciInfo(gpu.handle).busId))
        ecc(gpu)
        gpu.group("pcie", {"replays": lambda: nv.nvmlDeviceGetPcieReplayCounter(gpu.handle)})
        nvlinks(gpu)
    except Gone:
        return {}
    return counters(gpu.device)


def main() -> int:
    """Print them; exit code 1 where NVML does not answer."""
    try:
        nv = importlib.import_module("pynvml")
    except ImportError:
        return 1
    out: dict[str, int] = {}
    try:
        nv.nvmlInit()
        for index in range(nv.nvmlDeviceGetCount()):
            out |= _of(Asker(nv, lambda _kind, _value: None, index))
    except nv.NVMLError:
        return 1
    print(json.dumps(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
