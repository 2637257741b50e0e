"""State taken over into a world of another size: what all share, and each share's position."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import source, write
from torch import nn

from robust_slurm.checkpoint.capture.sharing import Share
from robust_slurm.checkpoint.capture.state import OpenedSnapshot, State, StateError
from robust_slurm.checkpoint.capture.taken_over import Taken, fixed


class Loader:
    """A position in one share's data, with a tensor in it."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": torch.full((3,), self.at)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]
        assert state["order"].tolist() == [self.at] * 3


def objects(rank: int, loader: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    model = nn.Linear(3, 5)
    torch.manual_seed(100 + rank)
    return {"model": model, "loader": loader, "rng": None}


def saved(tmp_path: Path, world: int, loaders: Mapping[int, Any]) -> list[OpenedSnapshot]:
    """A snapshot of each rank of a world whose ranks hold the same model."""
    found = []
    for rank in range(world):
        share = Share(tuple(range(world)))
        state = State(objects(rank, loaders[rank]), rank=rank, share=share)
        items, values = state.capture()
        path = tmp_path / f"{world}-{rank}.safetensors"
        found.append(source(write(path, items, values, rank=rank, world=world)))
        state.release()
    return found


def test_a_smaller_world_takes_over_model_generators_and_every_position(tmp_path: Path) -> None:
    """Rank 1 of 4 is lost: its share is rank 1's again, that was rank 2; rank 3's is rank 0's."""
    sources = saved(tmp_path, 4, {r: {r: Loader(10 + r)} for r in range(4)})
    for rank, origin, shares in ((0, 0, (0, 3)), (1, 2, (1,)), (2, 3, (2,))):
        loaders = {share: Loader() for share in shares}
        given = objects(rank, loaders)
        with torch.no_grad():
            given["model"].weight.zero_()
        state = State(given, rank=rank, share=Share((0, 1, 2)))
        state.restore(sources, Taken(origin, shares))
        torch.manual_seed(7)
        assert torch.equal(given["model"].weight, nn.Linear(3, 5).weight)
        assert {share: each.at for share, each in loaders.items()} == {s: 10 + s for s in shares}
        state.restore(sources, Taken(origin, shares))
        drawn = torch.rand(3)
        torch.manual_seed(100 + origin)
        assert torch.equal(drawn, torch.rand(3))


def test_a_buffer_of_a_parameters_memory_is_taken_over(tmp_path: Path) -> None:
    """Buffer and parameter were saved under two names, as one is a buffer, and hold the same."""

    def made() -> dict[str, Any]:
        model = nn.Linear(3, 5)
        model.register_buffer("alias", model.weight.data)
        return {"model": model}

    given = made()
    items, values = State(given, rank=0).capture()
    sources = [source(write(tmp_path / "2-0.safetensors", items, values, needs=(0,), world=2))]
    here = made()
    State(here, rank=0).restore(sources, Taken(0, (0, 1)))
    assert torch.equal(here["model"].weight, given["model"].weight)


def test_a_rank_that_was_none_keeps_the_generators_that_its_script_has_made(tmp_path: Path) -> None:
    held = {0: {0: Loader(10), 3: Loader(13)}, 1: {1: Loader(11)}, 2: {2: Loader(12)}}
    sources = saved(tmp_path, 3, held)
    loaders = {1: Loader()}
    state = State(objects(9, loaders), rank=1, share=Share((0, 1, 2, 3)))
    state.restore(sources, Taken(1, (1,), anew=True))
    assert loaders[1].at == 11
    drawn = torch.rand(3)
    torch.manual_seed(109)
    assert torch.equal(drawn, torch.rand(3))


def test_a_world_of_another_size_starts_from_disk_with_every_position(tmp_path: Path) -> None:
    """3 ranks of 4 saved, 4 begin, as after a requeue; of other shares nothing is taken."""
    held = {0: {0: Loader(10), 3: Loader(13)}, 1: {1: Loader(11)}, 2: {2: Loader(12)}}
    sources = saved(tmp_path, 3, held)
    for rank in range(4):
        loaders = {rank: Loader()}
        state = State(objects(rank, loaders), rank=rank)
        assert state.restore_positions(sources, 4)
        assert loaders[rank].at == 10 + rank
        loaders[rank].at = 0
        for original in (3, 5, 6):
            told = [sources[(original - 1) % 3], sources[original % 3]]
            assert not state.restore_positions(told, original)
        assert loaders[rank].at == 0


class GlobalLoader(Loader):
    """A loader whose position is that of all ranks."""

    shared_position = True


@pytest.mark.parametrize("several", [False, True])
def test_a_position_of_all_ranks_is_taken_over_by_any(tmp_path: Path, several: bool) -> None:
    def given(at: int) -> Any:
        return (
            {"train": GlobalLoader(at), "eval": GlobalLoader(at)} if several else GlobalLoader(at)
        )

    def at(loaders: Any) -> set[int]:
        return {each.at for each in (loaders.values() if several else [loaders])}

    sources = saved(tmp_path, 3, {rank: given(7) for rank in range(3)})
    loaders = given(0)
    assert fixed(loaders, (1,)) == ""
    State(objects(9, loaders), rank=1).restore(sources, Taken(2, (1,), anew=True))
    assert at(loaders) == {7}
    loaders = given(0)
    for original in (2, 8):  # from disk, in any other world
        assert State(objects(9, loaders), rank=1).restore_positions(sources[:1], original)
        assert at(loaders) == {7}
    bare = State({"model": nn.Linear(3, 5)}, rank=0)
    items, values = bare.capture()
    without = source(write(tmp_path / "bare.safetensors", items, values, rank=0, world=1))
    assert not State(objects(9, loaders), rank=1).restore_positions([without], 2)
    assert "one for each share" in fixed({"train": GlobalLoader(1), "eval": Loader(1)}, (1,))


def test_a_position_that_nobody_saved_by_shares_is_refused(tmp_path: Path) -> None:
    sources = saved(tmp_path, 2, {r: {r: Loader()} for r in range(2)})
    state = State(objects(0, {5: Loader()}), rank=0)
    with pytest.raises(StateError, match="position of share 5"):
        state.restore(sources, Taken(0, (5,)))
    state = State(objects(0, Loader()), rank=0)
    with pytest.raises(StateError, match="not saved by shares"):
        state.restore(sources, Taken(0, (0,)))


def test_a_share_without_a_loader_is_refused(tmp_path: Path) -> None:
    """A script that gives one for its own number only would leave out the data of share 3."""
    sources = saved(tmp_path, 4, {r: {r: Loader()} for r in range(4)})
    state = State(objects(0, {0: Loader()}), rank=0)
    with pytest.raises(StateError, match="this rank has share 0, 3"):
        state.restore(sources, Taken(0, (0, 3)))


def test_says_which_loaders_keep_a_job_at_its_size() -> None:
    assert not fixed(None, (0,)) and not fixed({2: Loader()}, (2,))
    for loader in (Loader(), [Loader()], {0: Loader()}):
        assert "one for each share" in fixed(loader, (2,))


def test_a_plan_that_knows_no_pipeline_keeps_a_job_at_its_size() -> None:
    """In a smaller world its ranks would get other rows than the shares of their replica."""

    class Planned(Loader):
        shared_position = True

        def __init__(self, *shares: int) -> None:
            super().__init__()
            self.shares = shares

    for loader in (Planned(1), Planned(1, 3), [Planned(1), {"eval": Planned(1)}], None):
        assert fixed(loader, (1,), by_replica=True) == ""
    for loader in (Planned(3), {"train": Planned(1), "eval": Planned(3)}):
        assert "its plan needs mesh=" in fixed(loader, (1,), by_replica=True)
        assert fixed(loader, (1,)) == "", "of a mesh without a pipeline nothing is asked"
