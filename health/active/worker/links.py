"""Copies between the host and its GPUs, and between GPUs: speed, and that what arrives is right.

Imports torch. For CUDA only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from health.active.worker.device import MOST_WRONG, WorkerDevice, hashed, on_each
from health.active_tests import Measured

WORDS = 32 << 20  # int64: 256 MiB a copy
LEAST = 3  # copies of each kind


def run(devices: Sequence[WorkerDevice], seconds: float, seed: int) -> list[Measured]:
    """One device after the other: they share the host's memory and often its bus."""

    def work(device: WorkerDevice) -> Measured:
        peers = [other for other in devices if other is not device]
        return _one(device, peers, seconds / len(devices), seed)

    if not devices[0].cuda:
        error = "the links test needs CUDA, but torch finds no GPU"
        return [Measured("links", "", device.name, device.model, error=error) for device in devices]
    return [answer for device in devices for answer in on_each("links", [device], work)]


def _one(
    device: WorkerDevice, peers: Sequence[WorkerDevice], seconds: float, seed: int
) -> Measured:
    """h2d and d2h from pinned memory; p2p_gbps is the slowest way to a peer that is direct."""
    share = seconds / (2 + len(peers))
    number = seed + (device.index or 0)
    data = hashed(number, WORDS, device.torch)
    host = torch.empty(WORDS, dtype=torch.int64, pin_memory=True)
    back = torch.empty_like(data)
    values = {"d2h_gbps": _speed(device, partial(host.copy_, data, non_blocking=True), share)}
    values["h2d_gbps"] = _speed(device, partial(back.copy_, host, non_blocking=True), share)
    wrong = _compare(f"{device.name} to the host and back", back, data)
    direct: list[float] = []
    for peer in peers:
        there = torch.empty(WORDS, dtype=torch.int64, device=peer.torch)
        rate = _speed(device, partial(there.copy_, data, non_blocking=True), share)
        values[f"p2p_{peer.name}_gbps"] = rate
        if torch.cuda.can_device_access_peer(device.index, peer.index):
            direct.append(rate)
        wrong += _compare(f"{device.name} to {peer.name}", there, hashed(number, WORDS, peer.torch))
    if direct:
        values["p2p_gbps"] = min(direct)
    return Measured("links", "", values=values, wrong=tuple(wrong[:MOST_WRONG]))


def _speed(device: WorkerDevice, copy: Callable[[], object], seconds: float) -> float:
    """1e9 bytes/s, the median of copies."""
    copy()
    device.synchronize()
    until = time.monotonic() + seconds
    took: list[float] = []
    while len(took) < LEAST or time.monotonic() < until:
        took.append(device.timed(copy))
    return WORDS * 8 / statistics.median(took) / 1e9


def _compare(way: str, got: torch.Tensor, must: torch.Tensor) -> list[str]:
    if torch.equal(got, must):
        return []
    places = (got != must).nonzero().flatten()
    at = int(places[0])
    return [
        f"{way}: {len(places)} of {len(must)} words arrived changed; word {at} must be "
        f"{int(must[at]) % (1 << 64):#018x}, is {int(got[at]) % (1 << 64):#018x}"
    ]
