"""Lists and datasets as sources, and which of them are refused."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from robust_slurm.data import DataError, Plan, records
from robust_slurm.data.errors import EndOfData
from robust_slurm.data.sources import records as module
from robust_slurm.data.steps import LocalSteps

datasets: Any = pytest.importorskip("datasets")
ROWS = [{"tokens": [number] * 3} for number in range(20)]


def from_parts(parts: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for part in parts:
        yield from part


def streaming(shards: int = 4) -> Any:
    parts = [ROWS[at::shards] for at in range(shards)]
    return datasets.IterableDataset.from_generator(from_parts, gen_kwargs={"parts": parts})


def interleaved(**options: Any) -> Any:
    parts = [streaming(2).take(10), streaming(2).skip(10)]
    return datasets.interleave_datasets(
        parts, probabilities=[0.5, 0.5], stopping_strategy="all_exhausted_without_replacement",
        **options,
    )  # fmt: skip


def numbers(source: Any, restart: int = 3) -> list[int]:
    """Return the documents of an epoch in their order, over a restart."""
    state, found = None, []
    for steps in (restart, 1000):
        made = LocalSteps(Plan({"a": source}, epochs=1, batch=2), [0], 1)
        made.seek(state)
        try:
            for _ in range(steps):
                _, rows, state = made.next()
                found += rows[0]["tokens"][:, 0].tolist()
        except EndOfData:
            pass
        made.close()
    return found


class Numbered:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        return self.rows[at]


@pytest.mark.parametrize(
    "source",
    [
        ROWS,
        [row["tokens"] for row in ROWS],
        [np.array(row["tokens"]) for row in ROWS],
        Numbered(ROWS),
        datasets.Dataset.from_list(ROWS),
        streaming(),
        streaming().map(lambda row: {"more": row["tokens"]}).filter(lambda _: True),
        streaming().take(20),
        interleaved(seed=3),
        records(ROWS, lambda row: {"tokens": row.pop("tokens")}, window=4),
    ],
)
def test_each_document_is_read_once_also_over_a_restart(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS", 7)
    found = numbers(source)
    assert Counter(found) == Counter(range(20)) and found != sorted(found)
    assert found == numbers(source, restart=5)


def test_shards_are_parts() -> None:
    assert Plan({"a": streaming()}).lanes() == {"a": 4}
    assert Plan({"a": streaming().take(20)}).lanes() == {"a": 1}, "shards would give others"


def test_other_records_are_another_source() -> None:
    changed = [*ROWS[:-1], {"tokens": [7]}]
    assert records(ROWS).fingerprint() == records(list(ROWS)).fingerprint()
    assert records(ROWS).fingerprint() != records(changed).fingerprint()
    arrays = [[{"a": np.arange(3) + more, "b": b"x", "c": (1, None)}] for more in (0, 1)]
    assert records(arrays[0]).fingerprint() != records(arrays[1]).fingerprint()
    assert records(streaming()).fingerprint() != records(streaming(2)).fingerprint()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (iter(ROWS), "a dataset that can be read again from its beginning"),
        ({"of", "text"}, "a dataset that can be read again from its beginning"),
        (streaming().shuffle(seed=1, buffer_size=4), "is shuffled: give it unshuffled"),
        (datasets.concatenate_datasets([streaming().shuffle(), streaming()]), "is shuffled"),
        (interleaved(), r"at random without a seed.* pass seed= to interleave_datasets"),
        (torch.utils.data.DataLoader(streaming()), "a source of records is a DataLoader"),
        (
            import_module("datasets.distributed").split_dataset_by_node(streaming(), 0, 2),
            "is divided among ranks",
        ),
        ("web/*.jsonl", r"make one with robust_slurm\.data\.jsonl"),
    ],
)
def test_what_cannot_be_read_again_alike_is_refused(source: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"source a.*{why}"):
        Plan({"a": source})


def test_an_iterable_that_shuffles_itself_is_refused() -> None:
    class Shuffled:
        def __iter__(self) -> Iterator[Any]:
            return iter(random.sample(ROWS, len(ROWS)))

    with pytest.raises(DataError, match="Shuffled gives other records at each pass"):
        numbers(Shuffled())


def test_an_error_of_a_record_is_of_that_record_and_one_of_a_shard_of_its_rest() -> None:
    def fails(row: dict[str, Any]) -> dict[str, Any]:
        if row["tokens"][0] == 5:
            raise ValueError("five")
        return row

    class Bad(Numbered):
        def __getitem__(self, at: int) -> Any:
            return fails(self.rows[at])

    found = list(records(Bad(ROWS)).read(0))
    assert [index for index, values in found if not isinstance(values, dict)] == [5]
    rest = list(records(streaming().map(fails)).read(1))
    assert "five" in rest[-1][1].why and rest[-1][1].rest


def test_a_streaming_dataset_is_not_changed_by_reading_it() -> None:
    """The objects keep where their iteration is: two threads with the same ones skip records."""
    dataset = streaming(1)
    before = copy.deepcopy(dataset.state_dict())
    source = records(dataset)
    assert len(list(source.read(0))) == 20 and source.fingerprint()
    assert dataset.state_dict() == before
