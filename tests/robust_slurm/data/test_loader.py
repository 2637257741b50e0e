"""The loader in a training: its state is that of the last batch, whatever is prepared ahead."""

from __future__ import annotations

import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_training import Training, fake_store, restart
from memory_source import corpus
from waiting import until

import robust_slurm
from robust_slurm import heartbeat
from robust_slurm.data import DataError, Loader, Plan, SourceStalled, steps
from robust_slurm.data import loader as loader_module
from robust_slurm.rejoin import renew

Batches = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world(monkeypatch, 0, 1, 1)
    monkeypatch.setattr(steps, "READ_AHEAD", 1 << 18)


def world(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, original: int) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setenv("ROBUST_RESIZED", f"{original}:{size}" if original != size else "")


def a_plan(**other: Any) -> Plan:
    given: dict[str, Any] = {"pack": 256, "batch": 2, "seed": 5, "cost": lambda m: m.tokens**2}
    sources = {"web": corpus("web", 1, each=30), "code": corpus("code", 2, each=30)}
    return Plan(sources=sources, **{**given, **other})


def take(loader: Loader, count: int) -> Batches:
    return [next(loader) for _ in range(count)]


def same(one: Batches, two: Batches) -> bool:
    return len(one) == len(two) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, two, strict=True)
    )


@pytest.fixture
def undisturbed() -> Iterator[Batches]:
    loader = Loader(a_plan())
    yield take(loader, 20)
    loader.close()


def test_it_goes_on_after_the_last_batch_that_was_handed_out(undisturbed: Batches) -> None:
    first = Loader(a_plan(), ahead=5)
    assert same(take(first, 7), undisturbed[:7])
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 4096
    take(first, 4)
    second = Loader(a_plan())
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert same(take(second, 13), undisturbed[7:])
    second.load_state_dict(state)  # back, in the same process
    assert same(take(second, 2), undisturbed[7:9])
    second.load_state_dict({"state": None, "given": 0})
    assert same(take(second, 2), undisturbed[:2])
    first.close()
    second.close()
    with pytest.raises(DataError, match="closed"):
        take(second, 3)


def test_a_rank_that_rejoins_keeps_nothing_of_its_last_loader(undisturbed: Batches) -> None:
    before = set(threading.enumerate())
    loader, kept = Loader(a_plan()), Loader(a_plan())
    assert same(take(loader, 3), undisturbed[:3]) and same(take(kept, 4), undisturbed[:4])
    gone = weakref.ref(loader)
    del loader
    renew.let_go_loaders()
    until(lambda: gone() is None and set(threading.enumerate()) <= before, "the end of threads")
    assert same(take(kept, 4), undisturbed[4:8]), "it is used after all"
    kept.close()


def test_the_epochs_are_over_at_the_same_step_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    for rank in range(3):
        world(monkeypatch, rank, 3, 3)
        loader = Loader(a_plan(epochs=1))
        lengths.append(len(list(loader)))
        assert next(loader, None) is None
        loader.close()
    assert lengths[0] > 10 and len(set(lengths)) == 1


def test_a_rank_of_a_smaller_world_gets_the_batches_of_all_its_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = []
    for rank in range(3):
        world(monkeypatch, rank, 3, 3)
        with_all = Loader(a_plan())
        whole.append(take(with_all, 6))
        state = with_all.state_dict()
        with_all.close()
    world(monkeypatch, 0, 2, 3)
    loader = Loader(a_plan())
    assert loader.shares == (0, 2)
    found = take(loader, 5)
    assert same(found, [whole[share][step] for step in range(3) for share in (0, 2)][:5])
    within = loader.state_dict()
    assert (within["given"], within["shares"]) == (1, [0, 2])
    assert same(take(loader, 7), [whole[s][n] for n in range(2, 6) for s in (0, 2)][1:])
    assert loader.state_dict() == state  # of the same step in the whole world
    loader.load_state_dict(within)
    assert loader.state_dict() == within
    assert same(take(loader, 1), [whole[2][2]])
    loader.close()
    world(monkeypatch, 1, 2, 3)
    other = Loader(a_plan())
    other.load_state_dict(state)
    with pytest.raises(DataError, match="in the middle of a step"):
        other.load_state_dict(within)
    other.close()
    world(monkeypatch, 0, 2, 3)
    for changed in ({"batch": 1}, {"cost": lambda m: -m.tokens % 97}, {"mesh": {"dp": 4}}):
        if "mesh" in changed:
            world(monkeypatch, 0, 2, 4)
        loader = Loader(a_plan(**changed))
        assert loader.shares == (0, 2)
        loader.load_state_dict(within)
        for _ in range(2):
            with pytest.raises(DataError, match="whose rows are others now"):
                next(loader)
        loader.close()


def test_a_pass_for_ranks_with_more_shares_takes_nothing_of_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 of 3 has one share of 4, and computes as often as rank 0, which has two."""

    class Sharded:
        set_requires_gradient_sync = None

    world(monkeypatch, 1, 3, 4)
    with_nothing_else = Loader(a_plan())
    plain = take(with_nothing_else, 2)
    with_nothing_else.close()
    loader = Loader(a_plan())
    for step in range(2):
        got, scales = [], []
        for _ in robust_slurm.accumulate(Sharded()):
            got.append(next(loader))
            scales.append(robust_slurm.world().scale)
        assert same(got, [plain[step]] * 2), step
        assert scales == [3 / 4, 0.0]
        assert loader.state_dict()["given"] == 0
    with pytest.raises(RuntimeError, match="read in each pass"):  # its loss would count twice
        for _ in robust_slurm.accumulate(Sharded()):
            next(loader)
    assert robust_slurm.world().scale == 3 / 4
    loader.close()


def test_a_state_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world(monkeypatch, 0, 1, 2)
    loader = Loader(a_plan())
    expected = take(loader, 7)
    loader.load_state_dict({"state": None, "given": 0})
    take(loader, 3)
    with pytest.raises(DataError, match="saved"):
        loader.load_state_dict({"state": {"version": 0}, "given": 0})
    assert same(take(loader, 4), expected[3:])
    loader.close()
    with pytest.raises(DataError, match="closed"):
        loader.load_state_dict({"state": None, "given": 0})


def test_a_fork_of_a_loader_that_has_begun_is_told_so() -> None:
    loader = Loader(a_plan())
    take(loader, 2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for use in (lambda: next(loader), loader.close):
            try:
                use()
            except DataError as error:
                os.write(write, str(error).encode()[:60] + b";")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as told:
        assert told.read().count(b"was begun by another process") == 2
    take(loader, 2)
    loader.close()


def test_a_wait_for_data_is_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[list[bytes]] = []
    waits = threading.Event()

    def write_phase() -> None:
        entered.append([*heartbeat._stack])
        waits.set()

    def mix(_step: int) -> dict[str, float]:
        assert waits.wait(60)
        return {"web": 1}

    monkeypatch.setattr(heartbeat, "_write_phase", write_phase)
    loader = Loader(a_plan(mix=mix))
    next(loader)
    assert entered == [[b"data wait"], []] and loader.waited >= loader_module.SHORT
    loader.close()


def test_a_thread_that_fetches_ahead_does_not_say_that_the_training_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[list[bytes]] = []
    monkeypatch.setattr(heartbeat, "_write_phase", lambda: entered.append([*heartbeat._stack]))
    monkeypatch.setattr(loader_module, "SHORT", 0.0)
    loader = Loader(a_plan())
    fetches = threading.Thread(target=take, args=(loader, 3))
    fetches.start()
    fetches.join()
    assert loader.waited > 0 and not entered
    loader.close()


def test_errors_of_the_users_functions_are_raised_where_batches_are_asked_for() -> None:
    loader = Loader(a_plan(mix=lambda step: {"web": 1} if step < 2 else {"wbe": 1}))
    take(loader, 2)
    for _ in range(2):
        with pytest.raises(DataError, match=r"mix\(2\): 'wbe'"):
            next(loader)
    loader.close()


def test_a_source_of_many_files_is_listed_for_longer_than_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    web, answers, looks = corpus("web", 1), threading.Event(), iter(range(99))
    listed = web.parts

    def look(_source: object) -> int:
        number = next(looks)
        if number == 4:
            answers.set()
        return number

    monkeypatch.setattr(type(web), "listed", property(look), raising=False)
    monkeypatch.setattr(web, "parts", lambda: answers.wait(60) and listed())
    web.options = web.options._replace(patience=0.05)
    assert Plan({"web": web}).lanes() == {"web": web.options.lanes}


def test_files_that_are_not_listed_count_for_the_patience(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    web, answers = corpus("web", 1, each=30), threading.Event()
    listed = web.parts
    monkeypatch.setattr(web, "parts", lambda: answers.wait(60) and listed())
    web.options = web.options._replace(patience=0.1)
    with pytest.raises(SourceStalled, match="web: its files are not listed after 0 s"):
        Loader(Plan({"web": web}))
    web.options = web.options._replace(stalled="wait")
    unlimited = corpus("web", 1)
    unlimited.options = unlimited.options._replace(patience=float("inf"))
    Loader(Plan({"web": unlimited}))
    loaders: list[Loader] = []
    waits = threading.Thread(target=lambda: loaders.append(Loader(Plan({"web": web}))))
    waits.start()
    line = "robust-slurm: data: source web: its files are not listed after 0 s; still waiting for "
    until(lambda: line in capfd.readouterr().err, "the line about it")
    answers.set()
    waits.join(60)
    take(loaders[0], 1)
    loaders[0].close()


@pytest.mark.parametrize(
    "state", [None, {}, {"state": None}, {"state": {}, "given": 0}, {"state": None, "given": 1}]
)
def test_a_foreign_state_is_refused(state: Any) -> None:
    loader = Loader(a_plan())
    with pytest.raises(DataError, match="saved"):
        loader.load_state_dict(state)
    loader.close()


def test_arrays_without_torch_and_numbers_that_torch_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numpy as np

    arrays = {"a": np.arange(3, dtype=np.uint16), "b": np.ones(2, np.uint32), "c": np.array(["x"])}
    made = loader_module.as_tensors(arrays)
    assert (made["a"].dtype, made["b"].dtype) == (torch.int32, torch.int64)
    assert made["c"] is arrays["c"]
    shared = np.zeros(3, np.int32)
    tensor = loader_module.as_tensors({"t": shared})["t"]
    shared[1] = 4
    assert tensor.tolist() == [0, 4, 0]
    monkeypatch.setitem(sys.modules, "torch", None)
    assert loader_module.as_tensors(arrays) == arrays


@pytest.mark.slow
def test_a_checkpointer_saves_and_restores_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Batches
) -> None:
    with fake_store(tmp_path / "s", monkeypatch) as store:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        first = Loader(a_plan(), ahead=4)
        training = Training(loader=first)
        assert training.ckpt.resume() == 0
        for number in range(1, 9):
            next(first)
            training.step(number)
        training.ckpt.close()
        first.close()
        (file,) = [m["file"] for m in store.wait("saved", 8) if m["step"] == 6]
        restart(store, 6, file)
        second = Loader(a_plan())
        again = Training(loader=second)
        assert again.ckpt.resume() == 6
        assert same(take(second, 5), undisturbed[6:11])
        again.ckpt.close()
        second.close()


def test_threads_share_a_loader(undisturbed: Batches) -> None:
    loader, found = Loader(a_plan()), Batches()
    tickets = iter(range(20))

    def take_some() -> None:
        for _ in tickets:
            found.append(next(loader))

    threads = [threading.Thread(target=take_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(batch["tokens"].sum() for batch in found) == sorted(
        batch["tokens"].sum() for batch in undisturbed
    )
    assert loader.state_dict()["state"]["step"] == 20
    loader.close()


def test_a_thread_that_waits_for_a_batch_is_told_that_the_loader_is_closed() -> None:
    waits, failed = threading.Event(), Batches()
    loader = Loader(a_plan(mix=lambda step: {"web": 1} if step < 1 or waits.wait(60) else {}))
    take(loader, 1)
    told: list[str] = []

    def take_next() -> None:
        try:
            next(loader)
        except DataError as error:
            told.append(str(error))

    thread = threading.Thread(target=take_next)
    thread.start()
    until(lambda: loader._asking.acquire(blocking=False) is False or loader._asking.release(), "")
    assert loader.state_dict()["state"]["step"] == 1, "the state does not wait for the batch"
    closes = threading.Thread(target=loader.close)
    closes.start()
    thread.join(60)
    assert told == ["the loader is closed"] and not failed
    waits.set()
    closes.join(60)


@pytest.mark.parametrize("prefetched", [1, 3])
def test_batches_that_were_taken_ahead_are_not_in_the_state(
    undisturbed: Batches, prefetched: int
) -> None:
    first = Loader(a_plan(), prefetched=prefetched)
    assert first.state_dict() == {"state": None, "given": 0}
    take(first, 6)
    second = Loader(a_plan(), prefetched=prefetched)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert same(take(second, 9), undisturbed[6 - prefetched : 15 - prefetched])
    first.close()
    second.close()
    ends = Loader(a_plan(epochs=1), prefetched=1)
    steps = len(list(ends))  # the loop has used the last one when it asks for another
    assert ends.state_dict()["state"]["step"] == steps
    ends.close()


def test_a_length_where_the_number_of_records_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    world(monkeypatch, 1, 2, 3)
    rows = [{"tokens": [number]} for number in range(50)]
    loader = Loader(Plan({"a": rows, "b": rows[:20]}, epochs=2, batch=4))
    assert len(loader) == 140 // 12 and bool(loader)
    first = take(loader, 3)
    assert len(loader) == 3 + len(list(loader)) and len(first) == 3
    loader.close()
    for unknown in (a_plan(epochs=1), Plan({"a": rows}), Plan({"a": corpus("a", 1)}, epochs=1)):
        loader = Loader(unknown)
        with pytest.raises(TypeError, match="number of steps is not known"):
            len(loader)
        assert loader
        loader.close()


def test_a_pass_after_the_end_and_too_few_samples_say_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    rows = [{"tokens": [number]} for number in range(50)]
    loader = Loader(Plan({"a": rows}, epochs=1, batch=4))
    assert len(list(loader)) == 12
    assert "over after 12 steps; left out at the end: 2 samples" in capfd.readouterr().err
    assert list(loader) == []
    assert "a further pass over its loader has no batch" in capfd.readouterr().err
    loader.close()
    few = Loader(Plan({"a": rows}, epochs=1, batch=51))
    with pytest.raises(DataError, match=r"1 epoch of all sources have 50 samples, a step .* 51"):
        next(few)
    few.close()


@pytest.mark.slow
def test_a_training_that_fetches_ahead_is_told_at_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with fake_store(tmp_path / "s", monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "1")
        for prefetched in (0, 1):
            loader = Loader(a_plan(), prefetched=prefetched)
            training = Training(loader=loader)
            training.ckpt.resume()
            next(loader)
            for number in range(1, 4):
                next(loader)
                training.step(number)
            training.ckpt.close()
            loader.close()
            said = capfd.readouterr().err
            assert ("the training is 1 ahead, and a restart skips" in said) is not prefetched
