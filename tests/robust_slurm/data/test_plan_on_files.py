"""A plan on real files of every format: each sample once, and the same batches after any fault."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from corpus_files import FORMATS

from robust_slurm.data.errors import EndOfData
from robust_slurm.data.plan import Plan
from robust_slurm.data.steps import LocalSteps

SHARES = 2
PACK = 16
NONE = -1  # padding


def fresh(folder: Path) -> LocalSteps:
    """Return the steps as a process that has just started makes them."""
    sources = {
        name: make(str(folder / f"*.{name}"), lanes=2, window=4)
        for name, (make, _) in FORMATS.items()
    }
    plan = Plan(sources, pack=PACK, batch=2, seed=7, epochs=1, pad={"tokens": NONE})
    return LocalSteps(plan, range(SHARES), SHARES)


def as_bytes(rows: Any) -> list[bytes]:
    return [rows[share]["tokens"].tobytes() for share in range(SHARES)]


@pytest.mark.slow
def test_each_sample_once_and_the_same_steps_over_a_hundred_faults(tmp_path: Path) -> None:
    numbers = random.Random(1)
    expected: Counter[int] = Counter()
    for at, (name, (_, write)) in enumerate(FORMATS.items()):
        for file in range(3):
            rows = []
            for record in range(numbers.randrange(1, 30)):
                first = 100_000 * at + 10_000 * file + 100 * record
                rows.append({"tokens": list(range(first, first + numbers.randrange(1, 30)))})
                expected.update(rows[-1]["tokens"])
            (tmp_path / f"{file}.{name}").write_bytes(write(rows))
    steps = fresh(tmp_path)
    steps.seek(None)
    undisturbed: list[list[bytes]] = []
    states: list[Any] = [None]
    given: Counter[int] = Counter()
    with pytest.raises(EndOfData):
        while True:
            _, rows, state = steps.next()
            for share in range(SHARES):
                given.update(rows[share]["tokens"][rows[share]["document_ids"] >= 0].tolist())
            undisturbed.append(as_bytes(rows))
            states.append(state)
    steps.close()
    assert max(given.values()) == 1 and not given - expected
    assert (expected - given).total() < 2 * 2 * PACK, "what fills no last step is dropped"

    for fault in range(100):
        begin = numbers.randrange(len(undisturbed))
        if fault % 10 == 0:  # the process is lost; else the training alone
            steps.close()
            steps = fresh(tmp_path)
        steps.seek(states[begin])
        for number in range(begin, min(begin + numbers.randrange(1, 6), len(undisturbed))):
            _, rows, state = steps.next()
            assert as_bytes(rows) == undisturbed[number] and state == states[number + 1]
    steps.close()
