"""Sealed pages, which the data process hands over, and the ring of steps that it keeps."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from robust_slurm.data import errors
from robust_slurm.data.errors import DataError
from robust_slurm.data.service import pages
from robust_slurm.data.service.made_step import MadeStep
from robust_slurm.data.service.ring import StepRing

PACKAGE = Path(errors.__file__).parent


@pytest.mark.parametrize(
    "value",
    [np.array([{}]), np.zeros(2, dtype=[("a", "i4")]), object(), {1: 2}, np.zeros(2, dtype="V2")],
)
def test_what_cannot_be_handed_over_unchanged_is_an_error(value: Any) -> None:
    with pytest.raises(DataError, match=r"'x'.*give Loader the plan itself"):
        pages.write({"x": value})


def test_pages_are_whole_and_sealed() -> None:
    batch = {"a": np.arange(5, dtype="<i2"), "none": np.zeros((0, 4)), "b": np.float32(2.5)}
    page = pages.write({**batch, "t": np.array(["xy"])})
    assert page.size < 512
    again = pages.read(os.dup(page.fd), page.head())
    for name, value in batch.items():
        np.testing.assert_array_equal(again[name], value)
        assert again[name].dtype == value.dtype
    assert again["t"].tolist() == ["xy"]
    again["a"][:] = 9  # its own copy
    assert pages.read(os.dup(page.fd), page.head())["a"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(PermissionError):
        os.pwrite(page.fd, b"x", 0)
    for wrong in (
        {"size": page.size + 1},
        {"arrays": [["a", "<i8", [99], 0]]},
        {"arrays": [["a"]]},
    ):
        with pytest.raises(DataError, match="cannot be used"):
            pages.read(os.dup(page.fd), {**page.head(), **wrong})
    unfinished = os.memfd_create("half", os.MFD_CLOEXEC)
    os.ftruncate(unfinished, page.size)
    with pytest.raises(DataError, match="not those of a finished step"):
        pages.read(unfinished, page.head())
    page.close()


def test_the_ring_is_bounded_and_keeps_what_is_ahead() -> None:
    ring = StepRing(memory=1000, ahead=4, back=4)

    def add(number: int, size: int = 100) -> None:
        page = pages.SealedPage(os.open("/dev/null", os.O_RDONLY), size, [])
        ring.add(MadeStep(str(number), number, {0: page}, None, str(number + 1)))

    def here() -> list[int]:
        return [number for number in range(40) if ring.find(str(number), [0])]

    for number in range(4):
        assert ring.wants_more()
        add(number)
    assert not ring.wants_more() and here() == [0, 1, 2, 3]
    for number in range(4, 10):
        ring.serve(str(number - 4))
        assert ring.wants_more()
        add(number)
    assert here() == [2, 3, 4, 5, 6, 7, 8, 9] and not ring.wants_more()
    assert ring.find("4", [0]) and ring.find("4", [0, 1]) is None
    ring.serve("9")
    add(10, 700)
    assert ring.size > 1000 and here() == [6, 7, 8, 9, 10] and not ring.wants_more()
    ring.clear("9")
    assert here() == [6, 7, 8]
    add(30)  # of another place: what was here is of no use
    assert here() == [30]
    ring.clear()
    assert len(ring) == 0 and ring.wants_more()


@pytest.mark.parametrize(
    ("memory", "most"),
    [
        (1 << 20, 32),  # small steps: as many as there may be
        (16000, 20),  # an eighth of the memory
        (1600, 8),  # as many as of large ones
        (800, 4),  # half of the memory
    ],
)
def test_more_of_small_steps_are_made_ahead(memory: int, most: int) -> None:
    ring = StepRing(memory=memory)
    while ring.wants_more():
        number = len(ring)
        held = {0: pages.SealedPage(os.open("/dev/null", os.O_RDONLY), 100, [])}
        ring.add(MadeStep(str(number), number, held, "{}", str(number + 1)))
    assert len(ring) == most
    assert ring.level().most_ahead == max(8, most)
    ring.clear()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_what_ranks_import_is_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))
