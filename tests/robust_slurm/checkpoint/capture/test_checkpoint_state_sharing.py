"""State shared by data-parallel ranks: who keeps what, and putting it together again."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import restore, source, write
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from robust_slurm.checkpoint.capture import sharing
from robust_slurm.checkpoint.capture.sharing import HOLDERS, Fingerprint, Share, checksum, divide
from robust_slurm.checkpoint.capture.state import OpenedSnapshot, State, StateError
from robust_slurm.checkpoint.format.layout import ITEM_SIZE, Entry

shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 17, 64]), max_size=3).map(tuple)


def entry(name: str, shape: tuple[int, ...], dtype: str) -> Entry:
    return Entry(name, dtype, shape, name, shape, (0,) * len(shape), "private")


@given(
    st.lists(st.tuples(shapes, st.sampled_from(["F32", "BF16", "U8", "F64"])), max_size=12),
    st.integers(1, 9),
)
def test_every_item_is_kept_once_and_in_about_equal_parts(
    tensors: list[tuple[tuple[int, ...], str]], ranks: int
) -> None:
    entries = [entry(f"t{i}", shape, dtype) for i, (shape, dtype) in enumerate(tensors)]
    shares = divide(entries, ranks)
    assert len(shares) == ranks
    kept: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {e.fqn: [] for e in entries}
    for parts in shares:
        names = [part.entry.name for part in parts]
        assert len(set(names)) == len(names)  # one block of a tensor in a file, named for it
        for part in parts:
            assert part.entry.kind == "shared"
            assert part.entry.global_shape == entries[part.which].shape
            kept[part.entry.fqn].append((part.entry.offsets, part.entry.shape))
    for e in entries:
        marks = torch.zeros(e.shape, dtype=torch.int)
        assert kept[e.fqn], "an empty tensor is kept as well"
        for offsets, shape in kept[e.fqn]:
            block = marks
            for dim, (start, length) in enumerate(zip(offsets, shape, strict=True)):
                block = block.narrow(dim, start, length)
            block += 1
        assert bool((marks == 1).all())
    total = sum(e.nbytes for e in entries)
    # A cut moves by half a row at most; rows are what is left after dimensions of size 1.
    row = max(
        (
            prod([s for s in e.shape if s != 1][1:], start=ITEM_SIZE[e.dtype])
            for e in entries
            if e.nbytes
        ),
        default=0,
    )
    for parts in shares:
        assert abs(sum(p.entry.nbytes for p in parts) - total / ranks) <= row


def test_the_same_on_every_rank() -> None:
    entries = [entry(f"t{i}", (i, 7), "F32") for i in range(30)]
    assert divide(entries, 4) == divide(list(entries), 4)


def objects(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(3, 5, 2), nn.BatchNorm1d(5), nn.Linear(4, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 5)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def snapshots(tmp_path: Path, ranks: int) -> list[OpenedSnapshot]:
    """One of each rank; their buffers differ, all else is the same."""
    opened = []
    for rank in range(ranks):
        found = objects()
        found["model"][1].running_mean.fill_(rank)
        state = State(found, rank=rank, share=Share(tuple(range(ranks))))
        path = tmp_path / f"own-{rank}"
        opened.append(source(write(path, *state.capture(), rank=rank, world=ranks)))
    return opened


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_all_is_put_together_from_the_peers_parts(ranks: int, tmp_path: Path) -> None:
    opened = snapshots(tmp_path, ranks)
    truth = objects()
    whole = sum(t.nbytes for t in truth["model"].parameters())
    sizes = [sum(e.nbytes for e in s.snapshot.entries if e.kind == "shared") for s in opened]
    assert max(sizes) < 3 * whole * 1.3 / ranks + 60
    fresh = objects(seed=1)
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters())
    restore(fresh, list(reversed(opened)), rank=1)
    assert float(fresh["model"][1].running_mean[0]) == 1  # its own
    for a, b in zip(fresh["model"].parameters(), truth["model"].parameters(), strict=True):
        assert a.equal(b)
        here, there = fresh["optimizer"].state[a], truth["optimizer"].state[b]
        assert all(here[k].equal(there[k]) for k in ("step", "exp_avg", "exp_avg_sq"))


def test_a_buffer_may_lie_in_a_parameter_that_is_cut(tmp_path: Path) -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(8, 8, bias=False)
        model.register_buffer("same", model.weight.detach())
        return {"model": model}

    opened = []
    for rank in range(2):
        state = State(made(0), rank=rank, share=Share((0, 1)))
        opened.append(source(write(tmp_path / f"{rank}", *state.capture(), rank=rank, world=2)))
    again = made(1)
    restore(again, opened, rank=1)
    assert again["model"].weight.equal(made(0)["model"].weight)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    opened = snapshots(tmp_path, 2)
    with pytest.raises(StateError, match=r"(model|optimizer)\.\S+: .*ranks \[0\]"):
        restore(objects(), opened[:1], rank=0)


def test_parts_that_overlap_are_not_taken_for_the_whole(tmp_path: Path) -> None:
    first, second = snapshots(tmp_path, 2)
    cut = {e.fqn: e for e in first.snapshot.entries if e.shape != e.global_shape}
    ((name, e),) = cut.items()
    other = next(x for x in second.snapshot.entries if x.fqn == name)
    moved = other._replace(offsets=tuple(max(0, o - 1) for o in other.offsets))
    assert moved != other and e.kind == "shared"
    entries = tuple(moved if x is other else x for x in second.snapshot.entries)
    wrong = OpenedSnapshot(second.snapshot._replace(entries=entries), second.tensors)
    with pytest.raises(StateError, match=f"{name}: of its .* without a gap"):
        restore(objects(), [first, wrong], rank=0)


def test_checksum_tells_data_names_and_shapes_apart() -> None:
    truth = State(objects(), rank=0, share=Share((0, 1))).shared_crc()
    assert State(objects(), rank=1, share=Share((0, 1))).shared_crc() == truth
    assert State(objects(seed=1), rank=1, share=Share((0, 1))).shared_crc() != truth
    assert State(objects(), rank=0).shared_crc() is None
    tensor = torch.arange(6.0)
    plain = checksum([(entry("a", (6,), "F32"), tensor)])
    assert checksum([(entry("b", (6,), "F32"), tensor)]) != plain
    assert checksum([(entry("a", (2, 3), "F32"), tensor.view(2, 3))]) != plain
    assert checksum([(entry("a", (6,), "F32"), torch.arange(12.0)[::2] / 2)]) == plain


def test_what_was_put_together_from_peers_parts_is_not_read_again(tmp_path: Path) -> None:
    opened = snapshots(tmp_path, 2)
    states, weights = [], []
    for rank in range(2):
        found = objects(seed=rank)
        states.append(State(found, rank=rank, share=Share((0, 1))))
        states[-1].restore(opened)
        weights.append(found["model"][0].weight)
    whole = states[0].shared_crc()
    assert states[1].shared_crc() == whole
    names = states[0].shared_crc(restored=True)
    assert names != whole
    with torch.no_grad():
        weights[0][0, 0] += 1  # nobody looks
    assert states[0].shared_crc(restored=True) == states[1].shared_crc(restored=True) == names
    assert states[0].shared_crc() != whole
    weights[0].data = torch.zeros(2, 2)  # another shape is seen
    assert states[0].shared_crc(restored=True) != names


def test_what_other_peers_put_together_is_read(tmp_path: Path) -> None:
    opened = snapshots(tmp_path, 2)
    state = State(objects(seed=0), rank=0, share=Share((0, 2)))  # it was (0, 1) at the save
    state.restore(opened)
    assert state.shared_crc(restored=True) == state.shared_crc()


def test_what_each_rank_restored_for_itself_is_compared(tmp_path: Path) -> None:
    crcs = []
    for rank in range(2):
        found = objects(seed=rank)
        state = State(found, rank=rank)  # each kept all of its own
        path = tmp_path / f"own-{rank}"
        opened = source(write(path, *state.capture(), rank=rank, world=2))
        again = State(objects(seed=7), rank=rank, share=Share((0, 1)))
        again.restore([opened])
        crcs.append(again.shared_crc(restored=True))
    assert crcs[0] != crcs[1]


def test_buffers_are_each_ranks_own_and_not_in_the_checksum() -> None:
    found = objects()
    state = State(found, rank=0, share=Share((0, 1)))
    before = state.shared_crc()
    found["model"][1].running_mean.fill_(8)
    assert state.shared_crc() == before
    items, _ = state.capture()
    kinds = {i.entry.fqn: i.entry.kind for i in items}
    assert kinds["model.1.running_mean"] == "private"


def test_unshared_ranks_keep_all_themselves(tmp_path: Path) -> None:
    found = objects()
    state = State(found, rank=0, share=Share((0, 1)))
    state.capture()
    state.unshare()
    items, values = state.capture()
    assert {item.entry.kind for item in items} == {"private"}
    again = objects(seed=1)
    restore(again, [source(write(tmp_path / "s", items, values))], rank=0)
    assert again["model"][0].weight.equal(found["model"][0].weight)


def test_a_share_of_one_is_none() -> None:
    assert State(objects(), rank=0, share=Share((0,))).share is None


@pytest.mark.parametrize("whole", [False, True])
def test_a_fingerprint_tells_one_step_of_one_rank(whole: bool) -> None:
    def made(steps: int, seed: int = 0) -> int:
        found = objects(seed=seed)
        state = State(found, rank=0, share=Share((0, 1)))
        for _ in range(steps):
            for parameter in found["model"].parameters():
                parameter.grad = torch.ones_like(parameter)
            found["optimizer"].step()
        state.capture()
        return state.fingerprint(whole=whole)()

    assert made(1) == made(1) != made(2)
    assert made(1, seed=1) != made(1)
    assert made(1) & 1 == whole


def test_one_bit_anywhere_changes_a_fingerprint_of_the_whole() -> None:
    found = objects()
    state = State(found, rank=0, share=Share((0, 1)))
    state.capture()
    before = {whole: state.fingerprint(whole=whole) for whole in (False, True)}
    truth = before[True]()
    with torch.no_grad():
        found["model"][0].weight.view(-1)[1] += 1
    assert state.fingerprint(whole=True)() != truth
    assert before[False]() == state.fingerprint(whole=False)()


def test_one_bit_of_a_small_state_shows_at_each_step() -> None:
    """A larger one has its turn in a portion; it is the same one on all ranks."""
    found = objects()
    state = State(found, rank=0, share=Share((0, 1)))
    state.capture()
    assert state.fingerprint(whole=False, step=7)() == state.fingerprint(whole=False, step=7)()
    truth = state.fingerprint(whole=False, step=7)()
    found["model"][0].weight.data.view(-1).view(torch.int32)[1] ^= 1
    assert state.fingerprint(whole=False, step=7)() != truth
    found["model"][0].weight.data.view(-1).view(torch.int32)[1] ^= 1
    assert state.fingerprint(whole=False, step=7)() == truth


def test_what_is_not_shared_has_no_fingerprint() -> None:
    state = State(objects(), rank=0)
    state.capture()
    assert state.fingerprint(whole=True)() == -1


@pytest.mark.parametrize("ranks", [2, HOLDERS, 100, 1000])
def test_the_lists_of_what_ranks_need_do_not_grow_with_the_square_of_the_ranks(ranks: int) -> None:
    share = Share(tuple(range(3, 3 + 2 * ranks, 2)))
    holders = share.holders
    assert len(holders) == min(ranks, HOLDERS) and set(holders) <= set(share.ranks)
    assert holders[0] == share.ranks[0]  # by whom robust-srun knows the group
    gaps = {b - a for a, b in pairwise(holders)}
    assert max(gaps) - min(gaps) <= 2
    for rank in share.ranks:
        needs = share.needs(rank)
        assert set(needs) == {rank, *holders} and list(needs) == sorted(needs)
    assert sum(len(share.needs(rank)) for rank in share.ranks) <= ranks * (HOLDERS + 1)


def test_a_rank_that_keeps_no_part_is_restored_from_those_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "HOLDERS", 2)
    opened = snapshots(tmp_path, 4)
    kept = [{e.kind for e in s.snapshot.entries} for s in opened]
    assert [("shared" in kinds) for kinds in kept] == [True, False, True, False]
    truth, fresh = objects(), objects(seed=1)
    restore(fresh, [opened[r] for r in Share((0, 1, 2, 3)).needs(3)], rank=3)
    for a, b in zip(fresh["model"].parameters(), truth["model"].parameters(), strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("whole", [False, True])
def test_a_torch_without_numpy_has_the_same_checksum(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = Fingerprint([(entry("t", (9,), "F32"), torch.arange(9.0))])
    one = fingerprint.take(whole=whole)()

    def refuse(_tensor: torch.Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    assert fingerprint.take(whole=whole)() == one
