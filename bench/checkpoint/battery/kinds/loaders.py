"""Data: torchdata's loader in its settings, samplers, augmentation, Hugging Face, plans."""

from __future__ import annotations

import itertools
import json
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from bench.checkpoint.battery.frame import WIDTH, Run, digest, kind, mse, net, sgd
from robust_slurm import data as plans

LOADER = r"(?i)loader|sampler|worker|dataset|\biter"
ROWS, BATCH = 40, 8
EPOCH = ROWS // BATCH
ENDS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


def row(i: int) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(i))


class Rows(Dataset[torch.Tensor]):
    """Rows that follow from their number, with an augmentation or none."""

    def __init__(self, augment: str = "", rows: int = ROWS) -> None:
        self.augment, self.rows = augment, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int) -> torch.Tensor:
        found = row(i)
        if self.augment == "torch":
            found = found + torch.randn(WIDTH)
        if self.augment == "numpy":
            found = found + torch.as_tensor(np.random.randn(WIDTH)).float()
        if self.augment == "python":
            found = found * random.random()
        return found


class Stream(IterableDataset[torch.Tensor]):
    """An iterable data set, with a state or none."""

    def __init__(self, stateful: bool, rows: int = ROWS) -> None:
        self.at, self.rows = 0, rows
        if stateful:
            self.state_dict: Any = lambda: {"at": self.at}
            self.load_state_dict: Any = lambda state: setattr(self, "at", state["at"])

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        part, parts = (info.id, info.num_workers) if info else (0, 1)
        while self.at < self.rows // parts:
            self.at += 1
            yield row((self.at - 1) * parts + part)
        self.at = 0


class Shuffled(Sampler[int]):
    """A sampler of the script's own, with a generator; with a state or none."""

    def __init__(self, stateful: bool) -> None:
        self.generator, self.at, self.order = np.random.default_rng(3), 0, []
        if stateful:
            self.state_dict: Any = lambda: {"at": self.at, "order": self.order, "epoch": self.epoch}
            self.load_state_dict: Any = self._load
        self.epoch = 0

    def _load(self, state: Any) -> None:
        self.at, self.order, self.epoch = state["at"], list(state["order"]), state["epoch"]

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        if self.at in (0, ROWS):
            self.at = 0
            self.order = np.random.default_rng(self.epoch).permutation(ROWS).tolist()
            self.epoch += 1
        while self.at < ROWS:
            self.at += 1
            yield self.order[self.at - 1]


class Buckets(Sampler[list[int]]):
    """A batch sampler of the script's own."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(ROWS)
        self.epoch += 1
        for i in range(EPOCH):
            yield order[i * BATCH : (i + 1) * BATCH].tolist()


def g() -> torch.Generator:
    return torch.Generator().manual_seed(7)


S = StatefulDataLoader
LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: S(Rows(), BATCH),
    "shuffle": lambda: S(Rows(), BATCH, shuffle=True),
    "drop_last": lambda: S(Rows(rows=ROWS + 3), BATCH, shuffle=True, drop_last=True),
    "generator": lambda: S(Rows(), BATCH, shuffle=True, generator=g()),
    "RandomSampler": lambda: S(Rows(), BATCH, sampler=RandomSampler(Rows())),
    "RandomSampler, generator": lambda: S(
        Rows(), BATCH, sampler=RandomSampler(Rows(), generator=g())
    ),
    "replacement": lambda: S(Rows(), BATCH, sampler=RandomSampler(Rows(), True, ROWS, g())),
    "WeightedRandomSampler": lambda: S(
        Rows(), BATCH, sampler=WeightedRandomSampler(list(range(1, ROWS + 1)), ROWS, generator=g())
    ),
    "weighted, global generator": lambda: S(
        Rows(), BATCH, sampler=WeightedRandomSampler(list(range(1, ROWS + 1)), ROWS)
    ),
    "SubsetRandomSampler": lambda: S(Rows(), BATCH, sampler=SubsetRandomSampler(range(ROWS), g())),
    "own sampler with state": lambda: S(Rows(), BATCH, sampler=Shuffled(True)),
    "own sampler without": lambda: S(Rows(), BATCH, sampler=Shuffled(False)),
    "own batch sampler": lambda: S(Rows(), batch_sampler=Buckets()),
    "BatchSampler": lambda: S(
        Rows(), batch_sampler=BatchSampler(RandomSampler(Rows(), generator=g()), BATCH, False)
    ),
    "stream with state": lambda: S(Stream(True), BATCH),
    "stream without": lambda: S(Stream(False), BATCH),
    "1 worker": lambda: S(Rows(), BATCH, shuffle=True, num_workers=1),
    "2 workers": lambda: S(Rows(), BATCH, shuffle=True, num_workers=2),
    "2 workers, generator": lambda: S(Rows(), BATCH, shuffle=True, num_workers=2, generator=g()),
    "persistent": lambda: S(Rows(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "every 3 steps": lambda: S(
        Rows(), BATCH, shuffle=True, num_workers=2, snapshot_every_n_steps=3, prefetch_factor=4
    ),
    "stream, 2 workers": lambda: S(Stream(True, 6 * BATCH), BATCH, num_workers=2),
}


def epochs(
    run: Run, loader: Any, *, first: bool = False, each: Any = None, length: int = EPOCH
) -> Any:
    """Train for three epochs, as most scripts do. ``first``: iter(loader) comes before resume();
    ``each``: called with the epoch before it begins; ``length``: batches of an epoch."""
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    iterator = iter(loader) if first else None
    ckpt = run.checkpointer(model=model, optimizer=optimizer, loader=loader)
    step = ckpt.resume()
    for epoch in range(step // length, 3):
        if each is not None:
            each(epoch)
        source = iterator if iterator is not None else loader
        iterator = None
        for batch in source:
            mse(model, batch if isinstance(batch, torch.Tensor) else batch["x"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.save(step)
    found = digest([model.state_dict(), step])
    ckpt.close()
    return found


@kind(
    LOADER,
    options=tuple(LOADERS),
    steps=15,
    variants=len(LOADERS),
    kills=ENDS,
    also=("warned",),
)
def stateful(run: Run) -> Any:
    """torchdata's StatefulDataLoader."""
    return epochs(
        run, LOADERS[run.option](), length=6 if run.option == "stream, 2 workers" else EPOCH
    )


@kind(
    LOADER,
    options=("shuffle", "2 workers", "in order", "persistent"),
    steps=15,
    kills=(5, 10),
    moments=("saved",),
)
def end_of_an_epoch(run: Run) -> Any:
    """A crash after an epoch's last save()."""
    return epochs(run, LOADERS[run.option]())


@kind(
    LOADER,
    options=("shuffle", "2 workers", "2 workers, augmented"),
    variants=6,
    steps=15,
    kills=ENDS,
    also=("warned", "refused"),
)
def iter_before_resume(run: Run) -> Any:
    """it = iter(loader) comes before resume()."""
    if run.option.endswith("augmented"):
        return epochs(run, S(Rows("torch"), BATCH, shuffle=True, num_workers=2), first=True)
    return epochs(run, LOADERS[run.option](), first=True)


@kind(
    LOADER,
    options=("torch", "numpy", "python"),
    steps=15,
    kills=ENDS,
    also=("warned",),
    variants=6,
    unseeable=r"worker",
)
def augmented_in_workers(run: Run) -> Any:
    """Random augmentation in worker processes."""
    return epochs(run, S(Rows(run.option), BATCH, shuffle=True, num_workers=2))


@kind(LOADER, steps=15, kills=ENDS, also=("warned",), unseeable=r"worker")
def augmented_in_persistent_workers(run: Run) -> Any:
    return epochs(
        run, S(Rows("torch"), BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    )


@kind(LOADER + "|rng|generator", options=("torch", "numpy", "python"), steps=15, kills=ENDS)
def augmented(run: Run) -> Any:
    """Random augmentation in the training's process."""
    return epochs(run, S(Rows(run.option), BATCH, shuffle=True))


@kind(LOADER, options=("shuffle", "2 workers"), steps=15, kills=ENDS)
def cycle(run: Run) -> Any:
    """An endless iterator that starts the loader again."""
    loader = LOADERS[run.option]()

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, loader=loader)
    batches = endless()
    for step in range(ckpt.resume(), run.steps):
        mse(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step + 1)
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind(
    LOADER, steps=15, kills=ENDS, also=("warned",), unseeable=r"itertools|cycle|prefetch|iterator"
)
def itertools_cycle(run: Run) -> Any:
    """itertools.cycle keeps the first pass's batches for ever."""
    loader = S(Rows(), BATCH, shuffle=True)
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, loader=loader)
    began = ckpt.resume()
    batches = itertools.cycle(loader)
    for step in range(began, run.steps):
        mse(model, next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step + 1)
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind(LOADER, options=("list", "dict"), steps=10, kills=(2, 3, 4, 5, 6))
def zipped(run: Run) -> Any:
    """Two loaders side by side, one of them shorter and begun again."""
    short, long = S(Rows(rows=24), BATCH, shuffle=True), S(Rows(rows=80), BATCH, shuffle=True)
    given: Any = [short, long] if run.option == "list" else {"short": short, "long": long}
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, loader=given)
    step = ckpt.resume()

    def again() -> Iterator[Any]:
        while True:
            yield from short

    for a, b in zip(long, again(), strict=False):
        mse(model, a + b).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        ckpt.save(step)
    found = digest([model.state_dict(), step])
    ckpt.close()
    return found


@kind(LOADER + r"|extra\.stage", steps=15, kills=ENDS)
def curriculum(run: Run) -> Any:
    """Easy data for 7 steps, then hard ones; the stage is in extra."""
    loaders = {"easy": S(Rows(rows=56), BATCH, shuffle=True), "hard": S(Rows(rows=72), BATCH)}
    stage = {"seen": 0}
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    ckpt = run.checkpointer(
        model=model, optimizer=optimizer, loader=loaders, extra={"stage": stage}
    )
    step = ckpt.resume()
    while step < run.steps:
        for batch in loaders["easy" if stage["seen"] < 56 else "hard"]:
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            stage["seen"] += len(batch)
            ckpt.save(step)
            if step == run.steps:
                break
    found = digest([model.state_dict(), step])
    ckpt.close()
    return found


@kind(LOADER, steps=15, kills=ENDS, also=("refused",))
def plain_loader(run: Run) -> Any:
    """torch's DataLoader, which has no state."""
    return epochs(run, DataLoader(Rows(), BATCH, shuffle=True))


@kind("model", steps=15, kills=ENDS)
def skips_batches(run: Run) -> Any:
    """torch's DataLoader, not given: each epoch is seeded, and the batches before are skipped."""
    loader = DataLoader(Rows(), BATCH, shuffle=True, generator=torch.Generator())
    model = net()
    optimizer = sgd(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer)
    step = ckpt.resume()
    for epoch in range(step // EPOCH, run.steps // EPOCH):
        loader.generator.manual_seed(epoch)
        for batch in itertools.islice(loader, step - epoch * EPOCH, None):
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.save(step)
    found = digest([model.state_dict(), step])
    ckpt.close()
    return found


@kind(LOADER, steps=15, kills=ENDS, also=("warned",), unseeable=r"prefetch|ahead|iterator")
def prefetcher(run: Run) -> Any:
    """A thread reads two batches ahead of the training: the loader's state is ahead, too."""
    loader = S(Rows(rows=200), BATCH, shuffle=True)
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, loader=loader)
    step = ckpt.resume()
    ahead: queue.Queue[Any] = queue.Queue(2)

    def fill() -> None:
        for batch in loader:
            ahead.put(batch)

    threading.Thread(target=fill, daemon=True).start()
    while step < run.steps:
        batch = ahead.get()
        while ahead.qsize() < 2:  # as on a machine where reading is quick
            pass
        mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        ckpt.save(step)
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind(LOADER, steps=15, kills=ENDS)
def evaluates_between(run: Run) -> Any:
    """Another loader is read for an evaluation, after each third step and before save()."""
    loader, other = S(Rows(), BATCH, shuffle=True), DataLoader(Rows(rows=16), BATCH, shuffle=True)
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, loader=loader)
    step = ckpt.resume()
    for _ in range(step // EPOCH, run.steps // EPOCH):
        for batch in loader:
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 3 == 0:
                float(sum(mse(model, each) for each in other))
            ckpt.save(step)
    found = digest([model.state_dict(), step])
    ckpt.close()
    return found


@kind(
    LOADER, steps=12, kills=(2, 3, 4, 5, 6, 7, 8), hazard=True, also=("warned",), unseeable=r"break"
)
def broken_off(run: Run) -> Any:
    """An epoch ends after 4 of 5 batches, by break."""
    loader = S(Rows(), BATCH, shuffle=True)
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, loader=loader)
    step = ckpt.resume()
    while step < run.steps:
        for batch in loader:
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.save(step)
            if step % 4 == 0:
                break
    found = digest([model.state_dict(), step])
    ckpt.close()
    return found


@kind(LOADER, steps=15, kills=ENDS, options=("StatefulDistributedSampler", "set_epoch"))
def distributed_sampler(run: Run) -> Any:
    """Samplers of one rank of one, whose order follows from the epoch."""
    sampler = StatefulDistributedSampler(Rows(), 1, 0, shuffle=run.option == "set_epoch", seed=3)
    loader = S(Rows(), BATCH, sampler=sampler)
    each = sampler.set_epoch if run.option == "set_epoch" else None
    return epochs(run, loader, each=each)


@kind(LOADER + r"|extra\.sampler", steps=15, kills=ENDS)
def sampler_in_extra(run: Run) -> Any:
    """A sampler with a state in extra, and a plain loop over it."""
    sampler = Shuffled(True)
    model = net()
    optimizer = sgd(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, extra={"sampler": sampler})
    step = ckpt.resume()
    while step < run.steps:
        order = iter(sampler)
        while rows := list(itertools.islice(order, BATCH)):
            mse(model, torch.stack([row(i) for i in rows])).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.save(step)
    found = digest([model.state_dict(), step])
    ckpt.close()
    return found


def frame(rows: int = ROWS) -> Any:
    table = {"x": [row(i).tolist() for i in range(rows)]}
    return datasets.Dataset.from_dict(table).with_format("torch")


@kind(LOADER, steps=15, kills=ENDS, options=("map", "map, 2 workers", "shuffled by seed"))
def hugging_face(run: Run) -> Any:
    """A data set of Hugging Face's in a StatefulDataLoader."""
    found = frame()
    if run.option.startswith("shuffled"):
        found = found.shuffle(seed=3)
    workers = 2 if "workers" in run.option else 0
    return epochs(run, S(found, BATCH, shuffle=True, num_workers=workers))


@kind(
    LOADER + "|shuffle|buffer", steps=15, kills=ENDS, also=("warned",), variants=6,
    options=("in order", "shuffle buffer", "mapped", "extra", "interleaved"),
)  # fmt: skip
def hugging_face_streaming(run: Run) -> Any:
    """An IterableDataset of Hugging Face's, with its own state."""
    stream = frame(rows=ROWS * 4).to_iterable_dataset(num_shards=4)
    if run.option == "shuffle buffer":
        stream = stream.shuffle(seed=5, buffer_size=16)
    if run.option == "mapped":
        stream = stream.map(lambda each: {"x": each["x"] * 2})
    if run.option == "interleaved":
        other = frame(rows=ROWS * 4).to_iterable_dataset(num_shards=4)
        stream = datasets.interleave_datasets([stream, other], probabilities=[0.5, 0.5], seed=1)
        stream = stream.with_format("torch")
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(1)
    by_hand = run.option == "extra"
    loader: Any = None if by_hand else S(stream, BATCH)
    given = {"extra": {"dataset": stream}} if by_hand else {"loader": loader}
    ckpt = run.checkpointer(model=model, optimizer=optimizer, **given)
    step = ckpt.resume()
    for batch in loader if loader is not None else grouped(stream):
        mse(model, batch["x"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        ckpt.save(step)
        if step == run.steps:
            break
    found = digest([model.state_dict(), step])
    ckpt.close()
    return found


def grouped(stream: Any) -> Iterator[Any]:
    """Batches by hand: nothing is read ahead."""
    rows = iter(stream)
    while part := list(itertools.islice(rows, BATCH)):
        yield {"x": torch.stack([torch.as_tensor(each["x"]) for each in part])}


@kind(LOADER, options=("loader", "extra"), steps=15, kills=ENDS)
def own_loader(run: Run) -> Any:
    """A loader of the script's own: memory-mapped tokens, a position and a generator."""

    class Tokens:
        def __init__(self) -> None:
            self.tokens = np.arange(4000) % 97
            self.generator, self.seen = np.random.default_rng(5), 0

        def __next__(self) -> torch.Tensor:
            at = self.generator.integers(0, 4000 - WIDTH, BATCH)
            self.seen += BATCH
            return torch.stack(
                [torch.as_tensor(self.tokens[i : i + WIDTH] / 97.0).float() for i in at]
            )

        def state_dict(self) -> Any:
            return {"generator": self.generator.bit_generator.state, "seen": self.seen}

        def load_state_dict(self, state: Any) -> None:
            self.generator.bit_generator.state, self.seen = state["generator"], state["seen"]

    loader = Tokens()
    given: Any = {"loader": loader} if run.option == "loader" else {"extra": {"loader": loader}}
    model = net()
    optimizer = sgd(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, **given)
    for step in range(ckpt.resume(), run.steps):
        mse(model, next(loader)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step + 1)
    found = digest([model.state_dict(), loader.seen])
    ckpt.close()
    return found


@kind(
    LOADER,
    options=("next", "one ahead", "epochs end"),
    steps=12,
    kills=(2, 3, 4, 5, 6, 7, 8),
    also=("warned",),
)
def plan(run: Run) -> Any:
    """robust_slurm.data: handed out as it is used, one batch ahead, or to the end of its epochs."""
    file = run.directory / "a.jsonl"  # goes with the loop, whatever kills it
    rows = [{"tokens": [(i * 7 + j) % 97 for j in range(3 + i % 9)]} for i in range(60)]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    settings: dict[str, Any] = {"epochs": 1} if run.option == "epochs end" else {}
    made = plans.Plan(
        sources={"a": plans.jsonl(str(file))}, pack=WIDTH, batch=2, seed=1, **settings
    )
    loader = plans.Loader(made)
    model = net()
    optimizer = sgd(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, loader=loader)
    step = ckpt.resume()
    batches = iter(loader)
    ahead = next(batches) if run.option == "one ahead" else None
    while step < run.steps or run.option == "epochs end":
        batch = ahead if ahead is not None else next(batches, None)
        if batch is None:
            break
        if ahead is not None:
            ahead = next(batches)
        mse(model, batch["tokens"].float() / 97).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        ckpt.save(step)
    found = digest([model.state_dict(), step])
    ckpt.close()
    loader.close()
    return found
