"""Copies from a device: in what order CUDA is asked, by which thread. No device: a fake of CUDA.

It shows order and counts, and that every byte arrives; not that a driver does what it is asked.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import BUS, COPY_THREAD, FakeCuda, install
from test_checkpoint_snapshot import form_of, read

from robust_slurm.checkpoint.copying import gpu, watch
from robust_slurm.checkpoint.copying import snapshot as copying
from robust_slurm.checkpoint.copying.expected import Expected
from robust_slurm.checkpoint.copying.sample import TensorSample
from robust_slurm.checkpoint.copying.slots import Ring, Slot
from robust_slurm.checkpoint.copying.snapshot import Copier, Copy, TornError
from robust_slurm.checkpoint.copying.watch import same_in_pieces


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


def begin(tmp_path: Path, tensors: list[torch.Tensor], **how: Any) -> tuple[Slot, Copy]:
    """A copy into a slot that fits; the last tensor is early."""
    form = form_of(tensors, list(range(len(tensors) - 1)))
    slot = Slot(tmp_path / "own-0-0.safetensors", 0)
    slot.fit(form)
    early = [tensors[i] for i in form.early]
    late = [tensors[i] for i in form.late]
    return slot, Copy(1, slot, form, late, early, lambda: "{}", **how)


def in_copy_thread(copy: Copy) -> None:
    copier = Copier()
    copier.submit(copy.run)
    assert copy.wait(20)
    copier.close(20)


def same(slot: Slot, tensors: list[torch.Tensor]) -> bool:
    found = read(slot)
    return all(torch.equal(found[f"t{i}"], tensor) for i, tensor in enumerate(tensors))


def test_the_copy_thread_issues_and_the_optimizer_makes_its_stream_wait(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    tensors = [torch.randn(50, 3), torch.tensor(2.0), torch.randn(7), torch.randn(4)]
    slot, copy = begin(tmp_path, tensors)
    cuda.calls.clear()
    in_copy_thread(copy)
    copy._copied.clear()  # as it is while the device copies
    assert copy.before_change(20)
    me = threading.current_thread().name
    assert cuda.of(me) == ["compute waits for copies"]  # the host waits for nothing
    assert cuda.of(COPY_THREAD) == [
        "set device 3", "set the capture mode", "copies waits for compute", "issue on copies",
        "record on copies", "host waits for copies",
    ]  # fmt: skip
    assert copy.error is None and same(slot, tensors)


def test_a_copy_takes_from_where_the_device_begins_it(tmp_path: Path, cuda: FakeCuda) -> None:
    """The copy's time does not count from save() on: the device is busy with the step then."""
    cuda.compute.busy(0.3)
    cuda.copy_s = 0.05
    _slot, copy = begin(tmp_path, [torch.randn(5), torch.randn(5)])
    in_copy_thread(copy)
    assert copy.error is None and copy.seconds == pytest.approx(0.05)


def test_save_records_one_event_however_many_tensors_there_are_and_waits_for_none(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    tensors = [torch.full((2,), float(i)) for i in range(500)]
    slot, copy = begin(tmp_path, tensors, expected=Expected(TensorSample(tensors[:-1])))
    assert cuda.of(threading.current_thread().name)[1:] == ["record on compute"]
    in_copy_thread(copy)
    assert same(slot, tensors)


def test_what_a_device_held_at_save_is_read_by_the_copy_thread_when_it_has_copied(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    tensors = [torch.randn(50, 3), torch.tensor(2.0), torch.randn(7), torch.randn(4)]
    _slot, copy = begin(tmp_path, tensors, expected=Expected(TensorSample(tensors[:-1])))
    tensors[2].data.zero_()
    in_copy_thread(copy)
    assert isinstance(copy.error, TornError) and copy.error.indices == [2]
    assert cuda.of(COPY_THREAD)[5:7] == ["host waits for copies", "issue on copies"]


def test_an_optimizer_that_comes_before_the_copy_thread_waits_until_copies_are_issued(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    _slot, copy = begin(tmp_path, [torch.randn(5), torch.randn(5)])
    assert not copy.before_change(0.01)
    in_copy_thread(copy)
    assert copy.before_change(20) and copy.error is None


def test_copied_inside_save_all_is_there_when_it_returns(tmp_path: Path, cuda: FakeCuda) -> None:
    tensors = [torch.randn(5), torch.randn(5)]
    slot, copy = begin(tmp_path, tensors, at_once=True)
    assert cuda.calls[-1][1] == "host waits for compute"
    expected = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    in_copy_thread(copy)
    assert copy.error is None and same(slot, expected)


def test_a_header_that_outgrows_its_room_waits_for_the_device(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    tensors = [torch.randn(50), torch.randn(5)]
    slot, copy = begin(tmp_path, tensors)
    copy._values = lambda: '\\"' + "8" * 100_000 + '\\"'
    in_copy_thread(copy)
    assert copy.error is None and same(slot, tensors)
    calls = cuda.of(COPY_THREAD)
    assert calls.index("host waits for copies") < calls.index("unregister")


class Counted:
    """A tensor's version, which the copy thread reads slowly."""

    def __init__(self) -> None:
        self.now = 0
        self.read, self.changed = threading.Event(), threading.Event()

    @property
    def _version(self) -> int:
        if threading.current_thread().name == COPY_THREAD:
            self.read.set()
            self.changed.wait(0.3)
        return self.now


def test_an_optimizer_that_steps_while_versions_are_compared_tears_nothing(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    _slot, copy = begin(tmp_path, [torch.randn(5), torch.randn(5)])
    version = Counted()
    issue = copy._issue

    def then_count() -> None:
        issue()
        copy.late, copy._versions = [version], [0]  # type: ignore[list-item]

    copy._issue = then_count  # type: ignore[method-assign]
    copier = Copier()
    copier.submit(copy.run)
    assert version.read.wait(20)
    assert copy.before_change(20)
    version.now += 1
    version.changed.set()
    assert copy.wait(20)
    copier.close(20)
    assert copy.error is None


def test_the_copy_thread_registers_the_next_slot_on_the_device_of_the_training(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    tensors = [torch.randn(5), torch.randn(5)]
    _slot, copy = begin(tmp_path, tensors)
    ring = Ring(tmp_path, 1, {})
    copier = Copier()
    copier.submit(copy.run)
    copier.submit(lambda: ring.prepare(copy.form, ()))
    copier.close(20)
    assert cuda.of(COPY_THREAD)[-1] == "register with flags 1 on device 3"


def test_memory_that_cannot_be_registered_is_said_and_the_error_forgotten(
    tmp_path: Path, cuda: FakeCuda
) -> None:
    cuda.runtime.error = 2
    tensors = [torch.randn(5), torch.randn(5)]
    slot, copy = begin(tmp_path, tensors)
    assert "out of memory, CUDA error 2" in slot.unpinned
    assert cuda.calls[1][1] == "clear the error"
    in_copy_thread(copy)
    assert copy.error is None and same(slot, tensors)
    slot.release()
    assert "unregister" not in [call for _, call in cuda.calls]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(60.0).view(5, 12).t(),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(100.0)[::2],
        torch.arange(64.0).view(2, 32).t().view(1, 32, 2),
        torch.arange(60.0).view(5, 12),
    ],
    ids=["transposed", "channels last", "every second", "one row", "contiguous"],
)
def test_no_piece_needs_more_temporary_memory_than_a_chunk(
    tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (copying, watch):
        monkeypatch.setattr(module, "CHUNK", 40)
    to = torch.zeros(tensor.shape)
    pairs = list(copying.pieces(to, tensor))
    assert all(of.nbytes <= 40 or of.is_contiguous() for _, of in pairs)
    assert all(one.is_contiguous() for one, _ in pairs)
    for one, other in pairs:
        one.copy_(other)
    assert torch.equal(to, tensor)
    assert len(pairs) == 1 or not tensor.is_contiguous()
    assert same_in_pieces(to, tensor)
    to.view(-1)[-1] += 1
    assert not same_in_pieces(to, tensor)


def test_slots_are_allocated_beside_the_gpu(
    tmp_path: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    device = tmp_path / BUS.lower()
    device.mkdir()
    (device / "local_cpulist").write_text(f"{one}\n")
    with gpu.nearby(tmp_path):
        assert os.sched_getaffinity(0) == {one}
    assert os.sched_getaffinity(0) == before
    (device / "local_cpulist").write_text("1000-1003\n")  # not of this job
    with gpu.nearby(tmp_path):
        assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("text, cpus", [("0-2,8\n", {0, 1, 2, 8}), ("\n", set()), ("5", {5})])
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert gpu.cpu_list(text) == cpus


def test_the_loaded_runtimes_are_found_whatever_they_are_called() -> None:
    maps = (
        "7f0-7f1 r-xp 0 00:1 5 /a b/libcudart-9335f6a2.so.12\n"
        "7f1-7f2 r--p 0 00:1 5 /a b/libcudart-9335f6a2.so.12\n"
        "7f2-7f3 r-xp 0 00:1 6 /c/libcudart.so.12 (deleted)\n"
        "7f3-7f4 r-xp 0 00:1 7 /libcudart/libtorch.so\n"
        "7f4-7f5 rw-p 0 00:0 0 \n"
    )
    assert gpu.loaded(maps) == ("/a b/libcudart-9335f6a2.so.12",)


def test_without_cuda_nothing_of_it_is_asked(tmp_path: Path, cuda: FakeCuda) -> None:
    cuda.initialized = False
    tensors = [torch.randn(5), torch.randn(5)]
    slot, copy = begin(tmp_path, tensors)
    in_copy_thread(copy)
    assert same(slot, tensors) and not cuda.calls
