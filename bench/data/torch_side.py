"""The corpus in torch's DataLoader and torchdata's StatefulDataLoader, as a good user reads it.

Every worker of every rank reads all sources, of each the records that are its own: what others
have is skipped undecoded. Files are shuffled by seed and epoch, records are not. The position is a
byte offset (JSONL) or a record (Parquet), so that a resumed worker reads nothing twice.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.utils.data
from torchdata.stateful_dataloader import StatefulDataLoader

from bench.data.corpus import JSONL, Corpus, Tokenizer, kind
from bench.data.packing import PACK, Packer, padded

GROUP = 64  # Parquet records that are decoded to Python at a time


@dataclass
class Cursor:
    """The position in one source: pass, turn in its files, record and (JSONL) byte in the file."""

    epoch: int = 0
    turn: int = 0
    record: int = 0
    offset: int = 0


@dataclass
class Place:
    """The state from which a worker goes on after a row."""

    cursors: dict[str, Cursor] = field(default_factory=dict)
    draw: Any = None
    pending: list[Any] = field(default_factory=list)
    ready: list[list[Any]] = field(default_factory=list)


class Mixed(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Rows of packed documents, drawn from all sources by the mixture."""

    def __init__(
        self, corpus: Corpus, tokenizer: Tokenizer, rank: int, world: int, seed: int = 7
    ) -> None:
        self.corpus, self.rank, self.world, self.seed = corpus, rank, world, seed
        self.tokenizer = tokenizer
        self.place = Place()

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's place, as plain values and tensors, which torch reads without
        pickle's power to run code."""
        place = self.place
        cursors = {name: vars(cursor).copy() for name, cursor in place.cursors.items()}
        pending, *ready = [
            [torch.from_numpy(tokens) for tokens in row] for row in (place.pending, *place.ready)
        ]
        return {"cursors": cursors, "draw": place.draw, "pending": pending, "ready": ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        cursors = {name: Cursor(**cursor) for name, cursor in state["cursors"].items()}
        pending, *ready = [
            [tokens.numpy() for tokens in row] for row in (state["pending"], *state["ready"])
        ]
        self.place = Place(cursors, state["draw"], pending, ready)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        each = worker.num_workers if worker else 1
        mine = self.rank * each + (worker.id if worker else 0)
        place = self.place
        chance = random.Random(self.seed * 1_000 + mine)
        if place.draw is not None:
            chance.setstate(place.draw)
        weights = self.corpus.weights()
        names, shares = list(weights), list(weights.values())
        streams = {
            name: self._stream(
                name, place.cursors.setdefault(name, Cursor()), mine, each * self.world
            )
            for name in names
        }
        packer = Packer(PACK, place.pending)
        ready = list(place.ready)
        while True:
            while not ready:
                (name,) = chance.choices(names, shares)
                ready = packer.add(self.tokenizer(next(streams[name]))["tokens"])
            row = ready.pop(0)
            place.draw, place.pending, place.ready = chance.getstate(), packer.pending[:], ready[:]
            yield padded(row)

    def _stream(self, name: str, at: Cursor, mine: int, all_: int) -> Iterator[dict[str, Any]]:
        """Yield this worker's records of a source for ever."""
        paths = self.corpus.paths(name)
        read = _jsonl if kind(name) == JSONL else _parquet
        while True:
            order = list(range(len(paths)))
            random.Random(f"{self.seed} {name} {at.epoch}").shuffle(order)
            while at.turn < len(order):
                yield from read(paths[order[at.turn]], at, mine, all_)
                at.turn, at.record, at.offset = at.turn + 1, 0, 0
            at.epoch, at.turn = at.epoch + 1, 0


def _jsonl(path: Path, at: Cursor, mine: int, all_: int) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        lines.seek(at.offset)
        for line in lines:
            own = at.record % all_ == mine
            at.record, at.offset = at.record + 1, at.offset + len(line)
            if own:
                yield json.loads(line)


def _parquet(path: Path, at: Cursor, mine: int, all_: int) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet

    begin = at.record
    with parquet.ParquetFile(path) as file:
        number = 0
        for group in file.iter_batches(GROUP):
            for index in range(group.num_rows):
                if number >= begin:
                    at.record = number + 1
                    if number % all_ == mine:
                        yield {key: group[key][index].as_py() for key in ("id", "text")}
                number += 1


def loader(
    stateful: bool,
    corpus: Corpus,
    tokenizer: Tokenizer,
    *,
    rank: int,
    world: int,
    rows: int,
    workers: int,
) -> torch.utils.data.DataLoader[Any]:
    """Return the loader of one rank: batches of ``rows`` rows."""
    dataset = Mixed(corpus, tokenizer, rank, world)
    made = StatefulDataLoader if stateful else torch.utils.data.DataLoader
    return made(dataset, batch_size=rows, num_workers=workers)
