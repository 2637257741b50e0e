"""The background copy: complete and exact, or not at all; and without holding up the rest."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import get_context

from robust_slurm.auto import teardown
from robust_slurm.checkpoint.copying import snapshot as copying
from robust_slurm.checkpoint.copying.expected import Expected
from robust_slurm.checkpoint.copying.form import Form
from robust_slurm.checkpoint.copying.sample import TensorSample, _reader
from robust_slurm.checkpoint.copying.slots import Slot, map_file
from robust_slurm.checkpoint.copying.snapshot import Copier, Copy, TornError
from robust_slurm.checkpoint.format.dtypes import NAME
from robust_slurm.checkpoint.format.layout import Entry, LayoutError, Snapshot, read_snapshot

ABOUT = Snapshot(0, 0, 1, 0, "job", {}, (0,), None, ())


def form_of(tensors: list[torch.Tensor], late: list[int]) -> Form:
    return Form(
        [
            Entry(f"t{i}", NAME[t.dtype], tuple(t.shape), f"t{i}", tuple(t.shape),
                  (0,) * t.dim(), "private")
            for i, t in enumerate(tensors)
        ],
        late,
        ABOUT,
    )  # fmt: skip


def begin(
    slot: Slot, form: Form, tensors: list[torch.Tensor], values: str = "{}", step: int = 1
) -> Copy:
    slot.invalidate()
    late, early = [tensors[i] for i in form.late], [tensors[i] for i in form.early]
    return Copy(
        step, slot, form, late, early, lambda: values, expected=Expected(TensorSample(late))
    )


def read(slot: Slot) -> dict[str, torch.Tensor]:
    return map_file(slot.path, read_snapshot(str(slot.path))[1])


def many() -> list[torch.Tensor]:
    big = torch.randn(300, 200)
    return [
        big, big.t()[:50], torch.randn(7, dtype=torch.float64), torch.tensor(3.0),
        torch.randn(0, 4), torch.randn(9).to(torch.bfloat16), torch.tensor([True, False]),
        *[torch.full((3,), float(i)) for i in range(2000)],
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("late", [[], [0, 1, 3, 100], None])
@pytest.mark.parametrize("fitted", [False, True])
def test_all_kinds_of_tensors_arrive(tmp_path: Path, late: list[int] | None, fitted: bool) -> None:
    tensors = many()
    form = form_of(tensors, list(range(len(tensors))) if late is None else late)
    slot = Slot(tmp_path / "own-0-0.safetensors", 0)
    if fitted:
        slot.fit(form)
    copy = begin(slot, form, tensors, '{\\"n\\":5}')
    early = [tensors[i] for i in form.early]
    expected = [t.clone() for t in tensors]
    for tensor in early:
        tensor.zero_()  # what is early may change at once
    copy.run()
    assert copy.error is None and copy.copied
    found = read(slot)
    for i, tensor in enumerate(expected):
        assert torch.equal(found[f"t{i}"], tensor), i
    assert read_snapshot(str(slot.path))[0].values == {"n": 5}


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "through .data"])
def test_a_tensor_that_changes_meanwhile_makes_it_torn(tmp_path: Path, counted: bool) -> None:
    tensors = [torch.ones(5), torch.ones(6), torch.ones(7)]
    slot = Slot(tmp_path / "own-0-0.safetensors", 0)
    copy = begin(slot, form_of(tensors, [0, 2]), tensors)
    tensors[1].add_(1)  # early: copied already
    (tensors[2] if counted else tensors[2].data).add_(1)
    copy.run()
    assert isinstance(copy.error, TornError) and copy.error.indices == [1]
    assert slot.step is None
    with pytest.raises(LayoutError, match="torn"):
        read_snapshot(str(slot.path))


def test_a_copy_that_ends_after_an_abort_is_no_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy may wait on the GPU for a collective, which then returns any data."""
    monkeypatch.setattr(copying, "halted", threading.Event())
    slot = Slot(tmp_path / "own-0-0.safetensors", 0)
    tensors = [torch.zeros(9)]
    copy = begin(slot, form_of(tensors, [0]), tensors)
    world = SimpleNamespace(pg_map={}, pg_names={}, pg_backend_config={})
    teardown.abort(SimpleNamespace(_world=world))
    copy.run()
    assert isinstance(copy.error, InterruptedError)
    with pytest.raises(LayoutError):
        read(slot)


def test_a_tensor_whose_memory_moves_is_found_again(tmp_path: Path) -> None:
    """Move a tensor like weights sent to another process: the old memory is gone then."""
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    form, sample = form_of([tensor], [0]), TensorSample([tensor])
    sample.take()
    place = tensor.data_ptr()
    get_context("spawn").SimpleQueue().put(tensor)
    assert tensor.data_ptr() != place
    slot = Slot(tmp_path / "own-0-0.safetensors", 0)
    copy = Copy(5, slot, form, [tensor], [], lambda: "{}", expected=Expected(sample))
    copy.run()
    assert copy.error is None
    assert torch.equal(read(slot)["t0"], tensor)


@pytest.mark.parametrize("late", [[], [0], [0, 1]])
def test_a_header_that_outgrows_its_room_moves_the_snapshot(
    tmp_path: Path, late: list[int]
) -> None:
    tensors = [torch.randn(1000), torch.randn(50)]
    form, slot = form_of(tensors, late), Slot(tmp_path / "own-0-0.safetensors", 0)
    slot.fit(form)
    expected = [t.clone() for t in tensors]
    copy = begin(slot, form, tensors, '\\"' + "8" * 100_000 + '\\"')
    for i in form.early:
        tensors[i].zero_()
    copy.run()
    assert copy.error is None
    assert [torch.equal(read(slot)[f"t{i}"], t) for i, t in enumerate(expected)] == [True, True]


def test_whatever_fails_is_kept_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    tensors = [torch.ones(5)]
    slot = Slot(tmp_path / "gone" / "own-0-0.safetensors", 0)
    copy = begin(slot, form_of(tensors, [0]), tensors)
    copier = Copier()
    copier.submit(copy.run)
    assert copy.wait(20)
    copier.close(20)
    assert isinstance(copy.error, FileNotFoundError)


def test_the_copy_thread_runs_one_thread_and_leaves_the_others_theirs() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    copier, done = Copier(), threading.Event()
    copier.submit(lambda: (seen.append(torch.get_num_threads()), done.set())[1])
    assert done.wait(20)
    copier.close(20)
    assert seen == [1]
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_python_runs_while_a_large_copy_is_under_way() -> None:
    """The copy holds no GIL: this thread counts on, before it is over."""
    source = torch.ones(64 << 20)  # 256 MB
    target = torch.empty_like(source)
    under_way, over = threading.Event(), threading.Event()

    def copy() -> None:
        under_way.set()
        for _ in range(5):
            copying._copy([target], [source])
        over.set()

    thread = threading.Thread(target=copy)
    thread.start()
    under_way.wait(20)
    counted = 0
    while not over.is_set():
        counted += 1
    thread.join()
    assert counted > 1000  # with the GIL held it would be a handful


def test_memory_that_is_gone_is_not_read() -> None:
    """On a GPU such a look would end the training."""
    tensor = torch.ones(9)
    sample = TensorSample([tensor])
    sample.take()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        sample.take()


def test_a_gpu_whose_memory_torch_cannot_describe_is_read_tensor_by_tensor() -> None:
    """Torch cannot do so without NumPy, nor in this process, where torch knows no GPU."""
    sample = TensorSample([torch.arange(9.0), torch.ones(2, dtype=torch.bfloat16)])
    (expected,) = sample.take()
    assert torch.equal(_reader(torch.device("cuda", 0), sample._items)(), expected)
