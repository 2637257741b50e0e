"""Slot files: invalid while being written, never without their memory, taken in the right order."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.checkpoint.copying.form import Form
from robust_slurm.checkpoint.copying.slots import SPARE, Ring, Slot, map_file
from robust_slurm.checkpoint.format.layout import Entry, LayoutError, Snapshot, read_snapshot

ABOUT = Snapshot(0, 2, 4, 1, "job", {"dp": 4}, (2,), None, ())


def entry(name: str, *shape: int, dtype: str = "F32") -> Entry:
    return Entry(name, dtype, shape, name, shape, (0,) * len(shape), "private")


ENTRIES = [entry("a", 3, dtype="U8"), entry("w", 4, 5), entry("s"), entry("none", 0, 7)]


def fill(slot: Slot, form: Form, step: int, values: str = "{}") -> dict[str, torch.Tensor]:
    slot.fit(form)
    late = {form.entries[i].name: t for i, t in zip(form.late, slot.late, strict=True)}
    early = {form.entries[i].name: t for i, t in zip(form.early, slot.early, strict=True)}
    made = {**late, **early}
    for tensor in made.values():
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + step)
    slot.complete(form.header(step, values), step)
    return {name: tensor.clone() for name, tensor in made.items()}


def test_what_is_written_is_read_back_also_by_the_safetensors_library(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "own-2-0.safetensors", 0)
    written = fill(slot, Form(ENTRIES, [1, 2], ABOUT), 7, '{\\"x\\":1}')
    snapshot, plan = read_snapshot(str(slot.path))
    assert (snapshot.step, snapshot.rank, snapshot.values) == (7, 2, {"x": 1})
    assert snapshot.mesh == {"dp": 4}
    ours, theirs = map_file(slot.path, plan), safetensors.torch.load_file(slot.path)
    for name, tensor in written.items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)
    assert stat.S_IMODE(slot.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("how", ["invalidate", "fit"])
def test_a_slot_that_is_not_complete_is_no_snapshot(tmp_path: Path, how: str) -> None:
    slot, form = Slot(tmp_path / "own-0-0.safetensors", 0), Form(ENTRIES, [1], ABOUT)
    fill(slot, form, 3)
    read_snapshot(str(slot.path))
    slot.invalidate() if how == "invalidate" else slot.fit(form)
    assert slot.step is None
    with pytest.raises(LayoutError, match="torn"):
        read_snapshot(str(slot.path))


@pytest.mark.parametrize(("ahead", "kept"), [(100, False), (SPARE, True), (2 * SPARE, False)])
def test_a_file_made_ahead_is_cut_to_its_form_and_stays_mapped(
    tmp_path: Path, ahead: int, kept: bool
) -> None:
    ring = Ring(tmp_path, 2, {})
    ring.reserve(ahead, ())
    (slot,) = ring.slots
    mapped, form = slot._map, Form(ENTRIES, [1], ABOUT)
    assert ring.take(()) is slot
    written = fill(slot, form, 3)
    assert (slot._map is mapped) == kept
    snapshot, plan = read_snapshot(str(slot.path))
    assert snapshot.step == 3 and slot.path.stat().st_size == form.plan.size
    assert torch.equal(map_file(slot.path, plan)["w"], written["w"])
    slot.fit(Form([*ENTRIES, entry("more", 100)], [1], ABOUT))
    assert slot._map is not mapped  # a snapshot of it may have readers


def test_a_file_of_an_earlier_process_is_never_cut(tmp_path: Path) -> None:
    """A process that still has it mapped would be killed by SIGBUS."""
    form = Form(ENTRIES, [1], ABOUT)
    path = Slot(tmp_path / "own-0-0.safetensors", 0).path
    path.write_bytes(bytes(form.plan.size + SPARE))
    slot = Slot(path, 0)
    with path.open("rb") as reader:
        slot.reserve(100)
        fill(slot, form, 3)
        assert len(reader.read()) == form.plan.size + SPARE
    assert path.stat().st_size == form.plan.size


def test_another_size_is_another_file_and_the_reader_of_the_old_one_keeps_it(
    tmp_path: Path,
) -> None:
    slot = Slot(tmp_path / "own-0-0.safetensors", 0)
    fill(slot, Form(ENTRIES, [1], ABOUT), 3)
    with slot.path.open("rb") as reader:
        before = reader.read()
        fill(slot, Form([*ENTRIES, entry("more", 100)], [1], ABOUT), 4)
        reader.seek(0)
        assert reader.read() == before
    assert read_snapshot(str(slot.path))[0].step == 4


def test_a_file_of_the_same_size_is_used_again_by_the_next_process(tmp_path: Path) -> None:
    form = Form(ENTRIES, [1], ABOUT)
    first = Slot(tmp_path / "own-0-0.safetensors", 0)
    fill(first, form, 3)
    inode = first.path.stat().st_ino
    first.release()
    second = Slot(first.path, 0)
    second.fit(form)
    assert second.path.stat().st_ino == inode
    with pytest.raises(LayoutError, match="torn"):
        read_snapshot(str(second.path))


def test_links_and_other_peoples_files_are_not_written_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    path = tmp_path / "own-0-0.safetensors"
    path.symlink_to(target)
    with pytest.raises(OSError):
        Slot(path, 0).fit(Form(ENTRIES, [1], ABOUT))
    assert target.read_text() == "precious"
    path.unlink()
    os.link(target, path)
    fill(Slot(path, 0), Form(ENTRIES, [1], ABOUT), 1)
    assert target.read_text() == "precious"


def test_no_room_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    slot = Slot(tmp_path / "own-0-0.safetensors", 0)
    with pytest.raises(OSError):
        slot.fit(Form([entry("huge", 1 << 50)], [0], ABOUT))
    assert list(tmp_path.iterdir()) == []


def save_in(ring: Ring, form: Form, step: int, held: set[int]) -> int:
    slot = ring.take(held)
    assert slot is not None
    slot.fit(form)
    slot.complete(form.header(step, "{}"), step)
    return slot.index


def test_three_slots_take_turns_and_a_fourth_stands_in_for_a_held_one(tmp_path: Path) -> None:
    ring, form = Ring(tmp_path, 0, {}), Form(ENTRIES, [1], ABOUT)
    assert [save_in(ring, form, s, set()) for s in range(1, 7)] == [0, 1, 2, 0, 1, 2]
    held = {2}  # step 6 is being written to the durable tier
    assert [save_in(ring, form, s, held) for s in range(7, 11)] == [3, 0, 1, 3]
    assert ring.slots[2].step == 6
    assert save_in(ring, form, 11, set()) == 2


def test_the_slot_that_was_prepared_is_the_one_taken(tmp_path: Path) -> None:
    ring, form = Ring(tmp_path, 0, {}), Form(ENTRIES, [1], ABOUT)
    for step in range(1, 6):
        ring.prepare(form, set())
        slot = ring.take(set())
        assert slot is not None and slot.fits(form)
        slot.complete(form.header(step, "{}"), step)


@given(st.lists(st.sets(st.integers(0, 3), max_size=2), max_size=30))
def test_the_newest_and_the_held_are_never_overwritten(held: list[set[int]]) -> None:
    ring = Ring(Path("/nowhere"), 0, {})
    for step, wanted in enumerate(held):
        complete = {s.index: s.step for s in ring.slots if s.step is not None}
        now = wanted & set(complete)
        newest = max(complete, key=lambda index: complete[index], default=None)
        slot = ring.take(now)
        if slot is None:
            assert len(now) >= 2
            continue
        assert slot.index not in now
        assert slot.index != newest
        assert len(ring.slots) <= 4
        slot.step = step


def test_after_a_restart_the_abandoned_and_the_oldest_go_first(tmp_path: Path) -> None:
    form = Form(ENTRIES, [1], ABOUT)
    before = Ring(tmp_path, 0, {})
    for step in (7, 8, 9):
        save_in(before, form, step, set())
    before.release()
    ring = Ring(tmp_path, 0, {0: 7, 1: 8, 2: 9})
    ring.abandon(8)
    with pytest.raises(LayoutError, match="torn"):
        read_snapshot(str(tmp_path / "own-0-2.safetensors"))
    assert [save_in(ring, form, step, set()) for step in (9, 10)] == [2, 0]
