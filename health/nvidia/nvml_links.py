"""NVLink and the fabric of one GPU, asked over NVML in the collector's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import byref
from functools import partial
from typing import Any

from health.nvidia.nvml_ask import NOT_SUPPORTED, Asker, code_name, pci_address

_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
_MOST_LINKS = 64

# Numbers of nvml.h that older pynvml does not name. A counter is the sum of its fields.
_FIELD_LINK_COUNT = 91
_LEGACY = {"replay": 0, "recovery": 1, "crc_flit": 2, "crc_data": 3}  # nvmlNvLinkErrorCounter_t
_DATA_LINK = {"replay": (161,), "recovery": (162,), "crc_flit": (163,)}
# NVLink 5 (Blackwell), where the driver serves neither of the above: link recoveries that worked
# and that failed; malformed packets, buffer overruns, receive errors, local link integrity.
_NVLINK5 = {"recovery": (213,), "fatal": (214,), "bad": (206, 207, 208, 211)}

Counters = Callable[[Asker, int], dict[str, int]]


def nvlinks(gpu: Asker) -> None:
    """Fill ``nvlinks``: all links of the board, with counters where they are up."""
    nv, h = gpu.nv, gpu.handle
    links = states(gpu)
    if links is None:
        return
    active = [link for link in links if link["active"]]
    for link in active:
        _keep(gpu, link, "version", lambda n: int(nv.nvmlDeviceGetNvLinkVersion(h, n)))
        _keep(gpu, link, "remote", lambda n: _remote(gpu, n))
    count_errors(gpu, active)
    gpu.device["nvlinks"] = links


def states(gpu: Asker) -> list[dict[str, Any]] | None:
    """The links that the board uses, and which are up; None: NVML does not say how many."""
    nv, h = gpu.nv, gpu.handle
    gpu.stage("nvlinks")
    try:
        count = int(gpu.field(_FIELD_LINK_COUNT))
    except (nv.NVMLError, AttributeError) as err:
        gpu.refused("nvlinks", err)
        return None
    links: list[dict[str, Any]] = []
    for number in range(min(count, _MOST_LINKS)):
        try:
            links.append({"link": number, "active": bool(nv.nvmlDeviceGetNvLinkState(h, number))})
        except nv.NVMLError as err:
            if gpu.failed(err) != NOT_SUPPORTED:  # that: the board does not use this link
                gpu.refused(f"nvlinks.{number}", err)
    return links


def _keep(gpu: Asker, link: dict[str, Any], key: str, call: Callable[[int], Any]) -> None:
    try:
        link[key] = call(link["link"])
    except gpu.nv.NVMLError as err:
        gpu.failed(err)


def _remote(gpu: Asker, number: int) -> str:
    return pci_address(gpu.nv.nvmlDeviceGetNvLinkRemotePciInfo(gpu.handle, number).busId)


def count_errors(gpu: Asker, links: list[dict[str, Any]]) -> None:
    """The counters of all links, asked the way that the first of them answers."""
    ways: tuple[Counters, ...] = (
        _legacy_counters,
        partial(_field_counters, _DATA_LINK),
        partial(_field_counters, _NVLINK5),
    )
    for link in links:
        gpu.stage(f"nvlinks counters of link {link['link']}")
        for way in ways:
            counters = way(gpu, link["link"])
            if counters:
                link["errors"] = counters
                ways = (way,)
                break


def _legacy_counters(gpu: Asker, link: int) -> dict[str, int]:
    out: dict[str, int] = {}
    for key, counter in _LEGACY.items():
        try:
            out[key] = int(gpu.nv.nvmlDeviceGetNvLinkErrorCounter(gpu.handle, link, counter))
        except (gpu.nv.NVMLError, AttributeError) as err:
            if gpu.failed(err) == NOT_SUPPORTED and not out:
                break
    return out


def _field_counters(
    counters: Mapping[str, tuple[int, ...]], gpu: Asker, link: int
) -> dict[str, int]:
    try:
        answers = gpu.fields(*((n, link) for numbers in counters.values() for n in numbers))
    except gpu.nv.NVMLError as err:
        gpu.failed(err)
        return {}
    got = {int(v.fieldId): int(gpu.checked(v)) for v in answers if not v.nvmlReturn}
    return {
        key: sum(got[n] for n in numbers if n in got)
        for key, numbers in counters.items()
        if any(n in got for n in numbers)
    }


def fabric(gpu: Asker) -> dict[str, Any]:
    """The GPU's state with the fabric manager (nvmlDeviceGetGpuFabricInfoV, else the old call)."""
    nv = gpu.nv

    def newest(h: Any) -> Any:
        info = nv.c_nvmlGpuFabricInfo_v2_t()
        nv.nvmlDeviceGetGpuFabricInfoV(h, byref(info))
        return info

    def older(h: Any) -> Any:
        info = nv.c_nvmlGpuFabricInfo_t()
        nv.nvmlDeviceGetGpuFabricInfo(h, byref(info))
        return info

    info = gpu.newest(newest, older)
    out: dict[str, Any] = {
        "state": _FABRIC_STATES.get(int(info.state), str(info.state)),
        "status": code_name(nv, int(info.status)),
    }
    if hasattr(info, "healthMask"):
        out["health"] = int(info.healthMask)
    return out
