"""Parts of all tests of devices: numbers by integer arithmetic, names, threads, faults."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from health.active.worker import device
from health.active.worker.device import (
    WorkerDevice,
    failed,
    fractions,
    hashed,
    integers,
    number_on_node,
)
from health.active_tests import Measured

CPU = torch.device("cpu")
_MASK = (1 << 64) - 1


def splitmix(seed: int, index: int) -> int:
    """Compute splitmix64 like the paper, with Python's integers."""
    x = (index + seed * 0xBF58476D1CE4E5B9) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


@given(st.integers(-(1 << 70), 1 << 70), st.integers(0, 1 << 40))
def test_hashed_is_splitmix(seed: int, start: int) -> None:
    got = hashed(seed, 3, CPU, start)
    assert [int(x) & _MASK for x in got] == [splitmix(seed, start + i) for i in range(3)]


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 24))
def test_integers_stay_in_their_range_and_use_both_ends(seed: int, most: int) -> None:
    got = integers(seed, 200, most, CPU)
    assert int(got.abs().max()) <= most
    assert int(got.min()) < 0 < int(got.max()) or most < 3


@pytest.mark.parametrize("bits", [7, 10, 23])
def test_fractions_are_exact_and_random(bits: int) -> None:
    got = fractions(1, 10_000, bits, CPU)
    scaled = got.double() * 2.0**bits
    assert torch.equal(scaled, scaled.round())
    assert float(got.abs().max()) < 1
    assert abs(float(got.mean())) < 0.02
    assert 0.55 < float(got.std()) < 0.6  # uniform: 1/sqrt(3)


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: uncorrectable NVLink error detected during the execution", True),
        ("CUDA error: unspecified launch failure", True),
        ("Unable to determine the device handle: GPU is lost", True),
        ("GPU has fallen off the bus", True),
        ("CUDA error: hardware stack error", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("feature is not supported by the hardware", False),
        ("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.3]:4242", False),
    ],
)
def test_only_a_failed_device_is_proof(text: str, is_fault: bool) -> None:
    wrong, error = failed(RuntimeError(text))
    assert bool(wrong) is is_fault
    assert bool(error) is not is_fault
    assert text in (wrong[0] if wrong else error)


def test_frames_of_torch_are_left_out() -> None:
    _, error = failed(RuntimeError("no way\nException raised from f at x.cpp:1\nframe #0: y"))
    assert error == "RuntimeError: no way"


@pytest.mark.parametrize(
    ("pci", "index", "number"),
    [((0, 0x18, 0), 0, 0), ((0, 0x2A, 0), 0, 1), ((1, 0x18, 0), 0, 2), ((0, 0x99, 0), 1, 1)],
)
def test_a_gpu_has_the_nodes_number(
    tmp_path: Path, pci: tuple[int, int, int], index: int, number: int
) -> None:
    for name in ("0001:18:00.0", "0000:2a:00.0", "0000:18:00.0", "bind", "new_id", "module"):
        (tmp_path / name).touch()
    assert number_on_node(pci, index, tmp_path) == number


def test_a_gpu_without_its_address_has_cudas_number(tmp_path: Path) -> None:
    assert number_on_node((-1, -1, -1), 3, tmp_path) == 3
    assert number_on_node((0, 1, 0), 3, tmp_path / "none") == 3


def test_a_gpu_is_known_by_its_uuid_where_torch_has_no_address(tmp_path: Path) -> None:
    for name, uuid in (("0000:18:00.0", "11-aa"), ("0001:2a:00.0", "22-bb")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "information").write_text(f"Model: X\nGPU UUID: \t GPU-{uuid}\n")
    assert device.address("22-bb", tmp_path) == [1, 0x2A, 0]
    for unknown in ("22-b", "", "33-cc"):
        assert device.address(unknown, tmp_path) == [-1, -1, -1]
    assert device.address("22-bb", tmp_path / "none") == [-1, -1, -1]


def test_several_at_once_have_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]

    def work() -> None:
        now[0] += 0.5

    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert WorkerDevice("cpu", "cpu").timed(work, 3) == 0.5


def test_devices_work_at_once_and_each_has_its_answer() -> None:
    devices = [WorkerDevice(f"cpu{i}", "cpu") for i in range(3)]

    together = Barrier(3, timeout=30)

    def work(one: WorkerDevice) -> Measured:
        together.wait()
        if one.name == "cpu1":
            raise RuntimeError("broken")
        return Measured("gemm", "", values={"n": float(one.name[3:])})

    found = device.on_each("gemm", devices, work)
    assert [one.device for one in found] == ["cpu0", "cpu1", "cpu2"]
    assert [one.error for one in found] == ["", "RuntimeError: broken", ""]
    assert found[2].values == {"n": 2.0}


def test_without_a_gpu_the_cpu_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(device, "_unusable", lambda: "")
    assert device.devices() == [WorkerDevice("cpu", "cpu")]
    monkeypatch.setattr(device, "_unusable", lambda: "/dev/nvidia0")
    with pytest.raises(RuntimeError, match="/dev/nvidia0"):
        device.devices()
