"""Plain values and lists that a script keeps beside its model are given back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import capture, plain, restore, scribble, source, write
from torch import nn

from robust_slurm.checkpoint.capture.beside.plain_values import Extra
from robust_slurm.checkpoint.capture.state import OpenedSnapshot


def saved(tmp_path: Path, objects: dict[str, Any]) -> OpenedSnapshot:
    return source(write(tmp_path / "s.safetensors", *capture(objects, rank=0)))


def test_plain_values_are_given_back(tmp_path: Path) -> None:
    kept = torch.arange(3.0)
    value = {"seen": [1, (2.5, None)], "t": kept, "again": kept}
    objects = plain(Extra({"note": value, "count": 7, "sum": torch.tensor(4.0)}))
    path = write(tmp_path / "s", *capture(objects, rank=0))
    here, live = torch.zeros(3), torch.tensor(0.0)
    note = {"seen": [], "t": here, "again": here}
    back = Extra({"note": note, "count": 0, "sum": live})
    restore(plain(back), [source(path)], rank=0)
    scribble(path)
    assert back["note"] is note and note["seen"] == [1, (2.5, None)]
    assert note["t"] is here and note["again"] is here and here.equal(kept)
    assert back["count"] == 7
    assert back["sum"] is live and float(live) == 4


def test_dotted_names_that_meet_are_told_apart(tmp_path: Path) -> None:
    value = {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, "a.b~2": torch.tensor(3.0)}
    back = Extra({"x": None})
    restore(plain(back), [saved(tmp_path, plain(Extra({"x": value})))], rank=0)
    found = back["x"]
    assert [float(found["a.b"]), float(found["a"]["b"]), float(found["a.b~2"])] == [1, 2, 3]


def test_lists_of_objects_in_extra_are_restored_in_place(tmp_path: Path) -> None:
    first = [random.Random(1), nn.Linear(2, 2)]
    second = [random.Random(2), nn.Linear(2, 2)]
    restore({"extra.x": second}, [saved(tmp_path, {"extra.x": first})], rank=0)
    assert second[0].random() == first[0].random()
    assert second[1].weight.equal(first[1].weight)
