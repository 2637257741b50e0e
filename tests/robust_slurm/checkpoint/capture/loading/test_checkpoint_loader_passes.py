"""A StatefulDataLoader goes on to the bit, wherever its pass was cut off; or it is named."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_files import capture, restore, source, write
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataSampler

from robust_slurm.checkpoint.capture.loading.passes import attach
from robust_slurm.checkpoint.capture.loading.worker_draws import watch
from robust_slurm.checkpoint.capture.state import State

SAMPLES, BATCH = 12, 3
PASS = SAMPLES // BATCH


class Noisy(data.Dataset[float]):
    """Draws from every generator that it can: the process's, and one of its own."""

    def __init__(self) -> None:
        self.own = numpy.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> float:
        drawn = (random.random(), float(torch.rand(())), numpy.random.random(), self.own.random())
        return at + sum(drawn) / 8


class Stream(data.IterableDataset[float]):
    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[float]:
        while self.at < SAMPLES:
            self.at += 1
            yield self.at + random.random() / 2
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Counting(data.Sampler[int]):
    """A sampler whose order depends on how often it was begun."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        self.epoch += 1
        return iter(torch.randperm(SAMPLES, generator=generator).tolist())


class Buckets:
    """Batches of one's own, shuffled by the process's generator."""

    def __len__(self) -> int:
        return PASS

    def __iter__(self) -> Iterator[list[int]]:
        order = [list(range(at, at + BATCH)) for at in range(0, SAMPLES, BATCH)]
        random.shuffle(order)
        yield from order


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def by(sampler: Any, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Noisy(), BATCH, sampler=sampler, **options)


def shuffled(**options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Noisy(), BATCH, shuffle=True, **options)


WEIGHTS = torch.arange(1.0, SAMPLES + 1)
LOADERS: dict[str, Callable[[], StatefulDataLoader[Any]]] = {
    "shuffled": shuffled,
    "generator": lambda: shuffled(generator=seeded()),
    "torch's sampler": lambda: by(data.RandomSampler(range(SAMPLES))),
    "torch's sampler, generator": lambda: by(
        data.RandomSampler(range(SAMPLES), generator=seeded())
    ),
    "weighted": lambda: by(data.WeightedRandomSampler(WEIGHTS.tolist(), SAMPLES)),
    "counting": lambda: by(Counting()),
    "buckets": lambda: StatefulDataLoader(Noisy(), batch_sampler=Buckets()),
    "no batches": lambda: StatefulDataLoader(Noisy(), None, shuffle=True),
    "last one dropped": lambda: StatefulDataLoader(Noisy(), 5, shuffle=True, drop_last=True),
    "stream": lambda: StatefulDataLoader(Stream(), BATCH),
}
WITH_WORKERS: dict[str, Callable[[], StatefulDataLoader[Any]]] = {
    "shuffled": lambda: shuffled(num_workers=2),
    "persistent": lambda: shuffled(num_workers=1, persistent_workers=True),
    "every third state": lambda: shuffled(num_workers=1, snapshot_every_n_steps=3),
    "counting": lambda: by(Counting(), num_workers=1),
    "stream": lambda: StatefulDataLoader(Stream(), BATCH, num_workers=1),
}


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def read(found: Any, steps: int, begun: Any = None) -> Iterator[list[float]]:
    """Yield what some steps see, over ends of epochs, with draws of their own."""
    while steps:
        for batch in found if begun is None else begun:
            seen = torch.as_tensor(batch).flatten().tolist()
            yield [*seen, random.random(), float(torch.rand(()))]
            steps -= 1
            if not steps:
                return
        begun = None


def cut_off(
    make: Callable[[], Any], stop: int, steps: int, tmp_path: Path, begun: Any = lambda _: None
) -> tuple[list[Any], list[Any], list[str]]:
    """Return what is seen without fault and Checkpointer, what with both, and remarks."""
    seed(1)
    alone = make()
    expected = list(read(alone, steps, begun(alone)))
    seed(1)
    objects = {"loader": make(), "rng": None}
    state = State(objects, rank=0)
    seen, remarks = [], list[str]()
    for step in read(objects["loader"], stop, begun(objects["loader"])):
        seen.append(step)
        state.capture()
        remarks += state.saved()
    opened = source(write(tmp_path / "s", *capture(objects, rank=0)))
    seed(2)
    again = {"loader": make(), "rng": None}
    held = begun(again["loader"])
    resumed = State(again, rank=0)
    resumed.restore([opened])
    seen += read(again["loader"], steps - stop, held)
    return expected, seen, remarks + resumed.saved()


@pytest.mark.parametrize("name", LOADERS)
def test_the_same_batches_come_after_a_restart(name: str, tmp_path: Path) -> None:
    """Amid the first pass, at its end, amid the second: all of them go on as if nothing was."""
    seed(1)
    length = sum(1 for _ in LOADERS[name]())
    for stop in (2, length, length + 1):
        expected, seen, remarks = cut_off(LOADERS[name], stop, 2 * length + 2, tmp_path)
        assert seen == expected and remarks == [], stop


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_WORKERS)
def test_workers_go_on_with_their_random_numbers(name: str, tmp_path: Path) -> None:
    for stop in (PASS, PASS + 1):
        expected, seen, remarks = cut_off(WITH_WORKERS[name], stop, 2 * PASS + 1, tmp_path)
        assert seen == expected and remarks == [], stop


def test_an_iterator_from_before_the_restore_goes_on_there(tmp_path: Path) -> None:
    expected, seen, remarks = cut_off(shuffled, 2, 2 * PASS, tmp_path, iter)
    assert seen == expected and remarks == []


def test_an_iterator_from_before_the_restore_begins_the_next_pass(tmp_path: Path) -> None:
    first, second = {"loader": shuffled(), "rng": None}, {"loader": shuffled(), "rng": None}
    list(read(first["loader"], PASS))
    opened = source(write(tmp_path / "s", *capture(first, rank=0)))
    held = iter(second["loader"])
    restore(second, [opened], rank=0)
    assert len(list(held)) == PASS  # for _ in range(step // PASS, ...): for batch in held


@pytest.mark.parametrize("draws", [True, False])
def test_workers_from_before_the_checkpointer_are_named_if_they_draw(
    draws: bool, tmp_path: Path
) -> None:
    kept: Any = Noisy() if draws else range(SAMPLES)

    def made() -> tuple[Any, State]:
        objects = {"loader": StatefulDataLoader(kept, BATCH, num_workers=1)}
        held = iter(objects["loader"])
        return held, State(objects, rank=0)

    held, state = made()
    list(itertools.islice(held, 2))
    opened = source(write(tmp_path / "s", *state.capture()))
    assert state.saved() == []
    held, state = made()
    state.restore([opened])
    next(held)
    state.capture()
    assert any("its workers draw at random" in text for text in state.saved()) == draws


@pytest.mark.parametrize(
    ("after", "batches"),
    [
        (lambda _: None, PASS),
        (lambda sampler: sampler.set_epoch(1), PASS),
        (lambda sampler: sampler.set_epoch(0), 0),
    ],
    ids=["computed from the step", "told to the sampler", "told to go on in it"],
)
def test_a_pass_of_which_all_is_done_is_over(after: Any, batches: int, tmp_path: Path) -> None:
    def make() -> Any:
        return by(data.DistributedSampler(Noisy(), num_replicas=1, rank=0))

    first, second = {"loader": make(), "rng": None}, {"loader": make(), "rng": None}
    list(read(first["loader"], PASS))
    opened = source(write(tmp_path / "s", *capture(first, rank=0)))
    state = State(second, rank=0)
    state.restore([opened])
    after(second["loader"].sampler)
    assert len(list(second["loader"])) == batches and state.saved() == []


@pytest.mark.parametrize(
    ("began", "ended", "batches"),
    [(0, 0, 0), (0, 1, PASS)],
    ids=["goes on in its epoch", "has counted the epoch that is over"],
)
def test_a_script_that_counts_its_epochs_is_believed(
    began: int, ended: int, batches: int, tmp_path: Path
) -> None:
    class Counts:
        def __init__(self) -> None:
            self.epoch = 0

        def state_dict(self) -> dict[str, Any]:
            return {"epoch": self.epoch}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.epoch = state["epoch"]

    def make() -> dict[str, Any]:
        return {"loader": shuffled(), "extra.run": Counts(), "rng": None}

    first, second = make(), make()
    state = State(first, rank=0)
    first["extra.run"].epoch = began
    for step, _ in enumerate(first["loader"], 1):
        first["extra.run"].epoch = ended if step == PASS else began
        items, values = state.capture()
        if step == PASS:
            opened = source(write(tmp_path / "s", items, values))
            break
    restore(second, [opened], rank=0)
    assert len(list(second["loader"])) == batches


class Drawing(Counting):
    """Draws from the process's generator for each sample."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield random.randrange(SAMPLES)


class Anew(Counting):
    """A sampler whose state lacks its position."""

    def __iter__(self) -> Iterator[int]:
        yield from range(SAMPLES)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Listed(Counting):
    """A sampler whose order depends on a list, which is not looked at."""

    begun: list[int]

    def __init__(self) -> None:
        self.begun = []

    def __iter__(self) -> Iterator[int]:
        self.begun.append(1)
        yield from [(at * (5 + 2 * len(self.begun))) % SAMPLES for at in range(SAMPLES)]


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (Drawing, "its Drawing draws from this process's random generators in the midst"),
        (Anew, "its Anew began its order anew"),
        (Listed, "its Listed does not repeat the order"),
    ],
)
def test_a_sampler_that_gives_another_order_is_named(
    sampler: type, says: str, tmp_path: Path
) -> None:
    _, _, remarks = cut_off(lambda: by(sampler()), PASS + 2, 3 * PASS, tmp_path)
    assert any(says in text and text.startswith("loader: ") for text in remarks)


def remarks_of(steps: Callable[[Any], Iterator[Any]]) -> list[str]:
    """Remarks on a script that saves after each step."""
    objects = {"loader": shuffled()}
    state = State(objects, rank=0)
    found = []
    for _ in steps(objects["loader"]):
        state.capture()
        found += state.saved()
    return found


def ahead(found: Any) -> Iterator[Any]:
    batches = iter(found)
    following = next(batches)
    for _ in range(3):
        following = next(batches)
        yield following


def broken(found: Any) -> Iterator[Any]:
    for _ in range(2):
        for batch in found:
            yield batch
            break


def zipped(found: Any) -> Iterator[Any]:
    for _ in range(2):
        for _, batch in zip(range(PASS), found, strict=False):
            yield batch


def elsewhere(found: Any) -> Iterator[Any]:
    yield from range(3)


def accumulated(found: Any) -> Iterator[Any]:
    for step, batch in enumerate(found, 1):
        if step % 2 == 0:
            yield batch


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (ahead, "loader: 1 more batch was taken from it before the first save() than the 1 of"),
        (broken, "loader: the script began a new pass over it before the last one was at"),
        (elsewhere, "loader: no batch was taken from it in the last 3 saved steps"),
        (accumulated, ""),
        (zipped, ""),
    ],
)
def test_a_position_that_is_not_the_trainings_is_named(
    steps: Callable[[Any], Iterator[Any]], says: str
) -> None:
    found = remarks_of(steps)
    assert len(found) == bool(says) and all(text.startswith(says) for text in found)


def test_a_loader_that_rests_while_another_is_in_use_is_no_fault() -> None:
    objects = {"loader": {"easy": shuffled(), "hard": shuffled()}}
    state, found = State(objects, rank=0), list[str]()
    for name in objects["loader"]:
        for _ in objects["loader"][name]:
            state.capture()
            found += state.saved()
    assert found == []


def test_what_datasets_does_not_save_is_named() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset()
    for found, says in (
        (stream, []),
        (stream.shuffle(buffer_size=9), ["shuffle(buffer_size=9) is in no state"]),
        (stream.map(dict), ["map() and filter() over Parquet"]),
    ):
        remarks = State({"loader": StatefulDataLoader(found)}, rank=0).saved()
        assert len(remarks) == len(says) and all(map(str.__contains__, remarks, says))


def test_later_passes_over_a_stream_of_datasets_are_whole(tmp_path: Path) -> None:
    """datasets by itself would begin each of them at the restored position."""
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        rows = datasets.Dataset.from_dict({"x": list(range(SAMPLES))}).to_iterable_dataset()
        return StatefulDataLoader(rows, BATCH, collate_fn=lambda found: [r["x"] for r in found])

    expected, seen, remarks = cut_off(make, 2, 3 * PASS, tmp_path)
    assert seen == expected and remarks == []


def test_nodes_around_a_sampler_without_a_state_are_named() -> None:
    nodes = pytest.importorskip("torchdata.nodes")
    for sampler, named in ((data.RandomSampler([1, 2]), True), (TorchdataSampler([1, 2]), False)):
        found = nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(sampler), 1))
        remarks = State({"loader": found}, rank=0).saved()
        assert [text for text in remarks if "the SamplerWrapper of torchdata" in text] == remarks
        assert bool(remarks) is named


def test_a_copy_of_a_loader_is_as_the_script_made_it() -> None:
    found = shuffled()
    attach(found)
    for made in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):  # noqa: S301 - our own
        assert type(made) is StatefulDataLoader and len(list(made)) == PASS


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "draws"), [(Noisy(), True), (list(range(SAMPLES)), False)])
def test_workers_of_a_plain_loader_that_draw_are_found(dataset: Any, draws: bool) -> None:
    found: Any = data.DataLoader(dataset, BATCH, num_workers=1, persistent_workers=True)
    flag = watch(found)
    assert len(list(found)) == PASS and flag is not None and bool(flag) is draws
    assert watch(data.DataLoader(dataset)) is None
