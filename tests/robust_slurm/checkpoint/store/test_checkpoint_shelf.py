"""A file that is known already: looked at again, its header read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_stores import write_snapshot

from robust_slurm.checkpoint.format import layout
from robust_slurm.checkpoint.store.shelf import TORN, Shelf, ShelfRecord, open_snapshot


@pytest.mark.parametrize("change", ["same", "torn", "another step", "another rank", "cut"])
def test_a_file_that_was_known_is_looked_at_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "own-0-1.safetensors"
    write_snapshot(path, 0, 7)
    fd, size, inode = open_snapshot(path)
    record = ShelfRecord(
        path.name, step=7, world=4, needs=(0,), epoch=0, size=size, inode=inode, digest=[]
    )
    with open(fd, "rb", buffering=0):
        shelf = Shelf(tmp_path)
        assert shelf.overwritten(fd, record) == ""
        if change == "cut":
            os.truncate(path, 100)
        elif change == "torn":
            with path.open("r+b") as file:
                file.write(bytes(8))
        else:
            write_snapshot(path, int(change == "another rank"), 7 + (change == "another step"))
        expected = {"same": "", "torn": TORN, "another step": "overwritten by step 8",
                    "another rank": "of rank 1", "cut": ""}  # fmt: skip
        for _ in range(2):
            said = shelf.overwritten(fd, record)
            assert (expected[change] in said) and bool(said) == (change != "same")


def test_a_header_that_is_known_is_not_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header is asked for before each piece that is sent, and takes as long as that does."""
    path = tmp_path / "own-0-1.safetensors"
    write_snapshot(path, 0, 7)
    fd, size, inode = open_snapshot(path)
    record = ShelfRecord(
        path.name, step=7, world=4, needs=(0,), epoch=0, size=size, inode=inode, digest=[]
    )
    read = []
    parse = layout.parse_header
    monkeypatch.setattr(layout, "parse_header", lambda *a: read.append(1) or parse(*a))
    with open(fd, "rb", buffering=0):
        for _ in range(3):
            assert Shelf(tmp_path).overwritten(fd, record) == ""
    assert len(read) == 1
