"""The user's class after a restart: what it goes on from, and files that cannot be used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from checkpoint_files import write
from checkpoint_stores import write_snapshot
from checkpointed_training import Training, fake_store, restart
from fake_checkpoint_store import FakeStore

from robust_slurm import Checkpointer, CheckpointError, heartbeat
from robust_slurm.checkpoint.capture.state import Share, State
from robust_slurm.checkpoint.training.resuming import from_memory


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with fake_store(tmp_path / "s", monkeypatch) as made:
        yield made


def test_a_restart_from_memory_goes_on_bit_by_bit(store: FakeStore) -> None:
    first = Training()
    first.ckpt.resume()
    losses = first.run(1, 8)
    first.ckpt.close()
    (file,) = [m["file"] for m in store.wait("saved", 8) if m["step"] == 6]
    second = Training()
    torch.randn(100)
    restart(store, 6, file)
    assert second.ckpt.resume() == 6
    assert store.wait("resumed")[0]["step"] == 6
    assert second.ckpt.extra["note"] == "after 6"
    assert second.run(7, 8) == losses[6:]
    second.ckpt.close()


def test_a_rank_that_stays_trains_as_a_new_one(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """… though the fault came in an evaluation; and it begins with nothing that is not restored."""
    training = Training()
    training.ckpt.resume()
    training.run(1, 2)
    training.ckpt.close()
    (file,) = [m["file"] for m in store.wait("saved", 2) if m["step"] == 2]
    training.model.eval()
    monkeypatch.setattr(heartbeat, "rejoined", True)
    given = {"model": training.model, "optimizer": training.optimizer}
    extra = {"schedule": training.schedule, "note": ""}
    with (
        pytest.raises(CheckpointError, match="later state"),
        Checkpointer(**given, extra=extra) as nothing,
    ):
        nothing.resume()
    restart(store, 2, file)
    monkeypatch.setattr(heartbeat, "rejoined", True)
    with Checkpointer(**given, extra=extra) as ckpt:
        assert ckpt.resume() == 2
    assert all(module.training for module in training.model.modules())


def test_after_a_restart_the_slots_of_abandoned_steps_go_first(store: FakeStore) -> None:
    first = Training()
    first.ckpt.resume()
    for step in range(1, 7):
        first.step(step)
        store.wait("saved", step)  # a store that lags behind has steps left out
    first.ckpt.close()
    newest = {m["slot"]: m["step"] for m in store.wait("saved", 6)}  # of three slots, or of four
    store.welcome["own"] = [{"slot": slot, "step": step} for slot, step in newest.items()]
    slots = {step: slot for slot, step in newest.items()}
    restart(store, 5, f"own-0-{slots[5]}.safetensors")
    second = Training()
    second.ckpt.resume()
    second.step(6)
    assert store.wait("saved", 7)[-1]["slot"] == slots[6]
    second.ckpt.close()


@pytest.mark.parametrize("damage", ["gone", "torn", "other step", "cut", "a path"])
def test_a_file_of_the_plan_that_cannot_be_used_is_told_and_ends_the_rank(
    store: FakeStore, damage: str
) -> None:
    first = Training()
    first.ckpt.resume()
    first.run(1, 2)
    first.ckpt.close()
    path = store.path.parent / store.wait("saved", 2)[1]["file"]
    step, name = 2, path.name
    if damage == "gone":
        path.unlink()
    elif damage == "torn":
        with path.open("r+b") as file:
            file.write(bytes(8))
    elif damage == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif damage == "other step":
        step = 3
    else:
        name = f"../s/{name}"
    store.welcome["restore"] = {"step": step, "shards": {"0": name}, "tier": "memory"}
    second = Training()
    before = [p.clone() for p in second.model.parameters()]
    with pytest.raises(CheckpointError, match="cannot be restored"):
        second.ckpt.resume()
    assert store.wait("unusable")[0]["file"] == name
    assert all(map(torch.equal, before, second.model.parameters()))
    second.ckpt.close()


@pytest.mark.parametrize("other", [{"epoch": 2}, {"line": 1}, {"world": 3}])
def test_one_step_of_two_times_is_not_put_together(tmp_path: Path, other: dict[str, int]) -> None:
    """A peer's copy of the step is of another run of the ranks: its part may be otherwise."""
    model = torch.nn.Linear(2, 2)
    state = State({"model": model}, rank=0)
    write(tmp_path / "own", *state.capture(), rank=0, world=2)
    write_snapshot(tmp_path / "fetched", 1, 1, **{"epoch": 1, "world": 2, **other})
    client = MagicMock(welcome={"directory": str(tmp_path)})
    plan = {"step": 1, "shards": {"0": "own", "1": "fetched"}}
    with pytest.raises(CheckpointError, match="another run of the ranks"):
        from_memory(state, client, plan)
    assert client.say.call_args.kwargs["file"] == "fetched"


@pytest.mark.parametrize(
    ("rank", "saved", "more", "why"),
    [
        (2, {"pp": 2, "dp": 2}, {"origin": 0}, "rank 2 is pp 1 of 2 .* rank 0, .* was pp 0 of 2"),
        (2, {}, {"origin": 0}, "rank 2 is pp 1 of 2 here, and rank 0, .* was the whole"),
        (1, {"dp": 2, "pp": 2}, {}, "rank 1 is pp 0 of 2 here, and rank 1, .* was pp 1 of 2"),
        (1, {"pp": 2, "dp": 2}, {}, ""),
        (1, {}, {}, ""),  # of this world, and it says nothing of stages
        (3, {"pp": 2, "dp": 3}, {"origin": 4}, ""),
    ],
)
def test_another_stage_of_a_pipeline_is_never_restored(
    rank: int, saved: dict[str, int], more: dict[str, int], why: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Though its tensors have the same names and shapes: numbers of ranks were mixed up."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "4")
    model = torch.nn.Linear(2, 2)
    origin, world = more.get("origin", rank), 6 if saved.get("dp") == 3 else 4
    captured = State({"model": model}, rank=origin).capture()
    write(tmp_path / "own", *captured, rank=origin, world=world, needs=(origin,), mesh=saved)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    client = MagicMock(welcome={"directory": str(tmp_path)})
    plan = {"step": 1, "shards": {str(origin): "own"}} | more
    state, here = State({"model": model}, rank=rank), {"pp": 2, "dp": 2}
    if not why:
        assert from_memory(state, client, plan, (), here) == 1
        assert torch.equal(model.weight, before)
        return
    with pytest.raises(CheckpointError, match=why):
        from_memory(state, client, plan, (), here)
    assert not model.weight.any()


@pytest.mark.parametrize(
    ("mesh", "alike"),
    [
        ({"dp": 2, "cp": 2}, (0, 1, 2, 3)),  # DDP over both, as context parallelism has it
        ({"outer": 2, "inner": 2}, (0, 1, 2, 3)),
        ({"pp": 2, "cp": 2}, (0, 1)),
    ],
)
def test_ranks_that_hold_the_same_may_differ_in_other_dimensions_than_dp(
    mesh: dict[str, int], alike: tuple[int, ...], tmp_path: Path
) -> None:
    """A job that keeps its size restarts from memory, whatever the mesh calls its dimensions."""
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    share = Share(alike)
    for rank in alike:
        captured = State({"model": model}, rank=rank, share=share).capture()
        write(tmp_path / str(rank), *captured, rank=rank, world=4, needs=alike, mesh=mesh)
    with torch.no_grad():
        model.weight.zero_()
    client = MagicMock(welcome={"directory": str(tmp_path)})
    plan = {"step": 1, "shards": {str(rank): str(rank) for rank in alike}}
    state = State({"model": model}, rank=1, share=share)
    assert from_memory(state, client, plan, (), mesh) == 1
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("mesh", [{"pp": 2, "dp": 0}, {"pp": 2, "dp": 3}])
def test_a_snapshot_whose_mesh_is_not_of_its_world_counts_as_bad(
    mesh: dict[str, int], tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 2)
    captured = State({"model": model}, rank=0).capture()
    write(tmp_path / "own", *captured, world=4, needs=(0,), mesh=mesh)
    client = MagicMock(welcome={"directory": str(tmp_path)})
    plan = {"step": 1, "shards": {"0": "own"}, "origin": 0}
    with pytest.raises(CheckpointError, match="is not of its 4 ranks"):
        from_memory(State({"model": model}, rank=0), client, plan, (), {"pp": 2, "dp": 2})
    assert client.say.call_args.kwargs["file"] == "own"


def test_a_rank_without_a_file_in_the_plan_calls_none_bad(store: FakeStore) -> None:
    store.welcome["restore"] = {"step": 2, "shards": {"1": "own-1-2.safetensors"}, "tier": "memory"}
    training = Training()
    with pytest.raises(CheckpointError, match="rank 0's snapshot was not copied to this node"):
        training.ckpt.resume()
    training.ckpt.close()
    assert not store.said("unusable")


def test_files_of_other_ranks_of_the_node_are_left_alone(store: FakeStore) -> None:
    """In a pipeline they hold other tensors of equal names."""
    first = Training()
    first.ckpt.resume()
    losses = first.run(1, 3)
    first.ckpt.close()
    restart(store, 2, store.wait("saved", 3)[1]["file"])
    (store.path.parent / "own-1-0.safetensors").write_bytes(bytes(100))
    store.welcome["restore"]["shards"]["1"] = "own-1-0.safetensors"
    second = Training()
    assert second.ckpt.resume() == 2
    assert second.run(3, 3) == losses[2:]
    second.ckpt.close()


def test_another_model_is_an_error_that_says_so(store: FakeStore) -> None:
    first = Training()
    first.ckpt.resume()
    first.run(1, 1)
    first.ckpt.close()
    restart(store, 1, store.wait("saved")[0]["file"])
    other = Checkpointer(model=torch.nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="does not fit this script") as failed:
        other.resume()
    assert failed.value.__suppress_context__  # one traceback, not two
    other.close()


def test_resume_is_called_once_and_first(store: FakeStore) -> None:
    training = Training()
    training.ckpt.resume()
    with pytest.raises(CheckpointError, match="once"):
        training.ckpt.resume()
    training.ckpt.close()


def test_a_scaler_has_not_unscaled_what_is_dropped() -> None:
    """A rank that stays was thrown out of a step after unscale_()."""
    model, scaler = torch.nn.Linear(2, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = {"optimizer": optimizer, "extra.scaler": scaler, "model": model}
    for _ in range(2):
        scaler.scale(model(torch.ones(2)).sum()).backward()
        scaler.unscale_(optimizer)
        State(objects, rank=0).drop_gradients()
        assert model.weight.grad is None
