"""Hold what ``programs/ckpt_resized.py`` has done against runs with the same sizes of the world at
the same steps, in which the changes were made by hand and no fault."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import data_plan
from places import REPOSITORY
from torch_forks import TorchForks, all_end_well

from robust_slurm.data.steps import LocalSteps
from srun_wrapper.agent.processes.ports import free_port

PROGRAMS = REPOSITORY / "tests" / "programs"
PROGRAM = PROGRAMS / "ckpt_resized.py"

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """The whole lines of a file of JSON objects."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]


def merged(lines: Iterable[Iterable[Line]]) -> dict[int, Line]:
    """Each step as it counts in the end, of those that all ranks have done: its world's size,
    loss, the ranks' states, all ids, the checksums of all rows of the plan."""
    done = [line for each in lines for line in each if "step" in line]
    epoch_of: dict[int, int] = {}
    for line in done:
        epoch_of[line["step"]] = max(line["epoch"], epoch_of.get(line["step"], 0))
    found: dict[int, Line] = {}
    for line in done:
        if line["epoch"] == epoch_of[line["step"]]:
            first = {"size": line["size"], "loss": line["loss"], "state": set()}
            first |= {"ids": {}, "rows": {}}
            step = found.setdefault(line["step"], first)
            assert (line["size"], line["loss"]) == (step["size"], step["loss"])
            step["state"].add(line["state"])
            assert not step["ids"].keys() & line["ids"].keys(), f"computed twice: {line}"
            step["ids"] |= line["ids"]
            step["rows"] |= line["rows"]
    last = max(found)
    return {number: step for number, step in sorted(found.items()) if number < last}


def check_shares(steps: dict[int, Line], count: int = 4) -> None:
    """Every share of every step was computed, with the samples that are next in its order, and
    the rows that the plan has for it. ``count``: of the shares."""
    assert list(steps) == list(range(1, len(steps) + 1))
    assert all(set(step["ids"]) == set(map(str, range(count))) for step in steps.values())
    once = 8 // count  # so many steps read all data once
    for first in range(1, len(steps) + 1 - once, once):
        some = [steps[first + more]["ids"] for more in range(once)]
        ids = [i for each in some for own in each.values() for i in own]
        assert sorted(ids) == list(range(24)), (first, some)
    plan = data_plan.without_mesh() if count == 4 else data_plan.of_pipelines()
    planned = LocalSteps(plan, range(count), count)
    planned.seek(None)
    for number, step in steps.items():
        _, rows, _ = planned.next()
        crcs = {str(share): zlib.crc32(rows[share]["tokens"].tobytes()) for share in range(count)}
        assert step["rows"] == crcs, number
    planned.close()


def check_same(
    steps: dict[int, Line], forks: TorchForks, directory: Path, *options: str, smaller: int = 3
) -> None:
    """Compare with the same sizes at the same steps, each world begun where the last one ended.

    ``options``: of the program; ``smaller``: size of the world between.
    """
    sizes = [(number, step["size"]) for number, step in steps.items()]
    phases = [
        (size, [number for number, _ in group])
        for size, group in groupby(sizes, lambda one: one[1])
    ]
    assert [size for size, _ in phases] == [4, smaller, 4]
    before: list[str] = []
    for number, (size, own) in enumerate(phases):
        here = directory / str(number)
        here.mkdir()
        words = [f"--dir={here}", f"--steps={own[-1]}", f"--from={own[0] - 1}", "--bare"]
        words += ["--pause=0", *options, *before, *(["--original=4"] if size < 4 else [])]
        run(forks, size, *words)
        planned = merged([*(read_lines(here / f"rank-{rank}.jsonl") for rank in range(size))])
        for step in own[:-1]:
            for name in ("loss", "ids", "rows", "state"):
                assert planned[step][name] == steps[step][name], (step, name, phases)
        before = [f"--before={here}"]
    here = directory / "undisturbed"
    here.mkdir()
    run(forks, 4, f"--dir={here}", f"--steps={len(steps)}", "--bare", "--pause=0", *options)
    undisturbed = merged([*(read_lines(here / f"rank-{rank}.jsonl") for rank in range(4))])
    for step, other in undisturbed.items():  # but for the order in which gradients are added up
        one, two = float.fromhex(steps[step]["loss"]), float.fromhex(other["loss"])
        assert abs(one - two) <= 1e-3 * abs(two), (step, one, two)


def run(forks: TorchForks, size: int, *words: str) -> None:
    """Run the program, to its end."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"WORLD_SIZE": str(size), "PYTHONPATH": str(REPOSITORY)}
    code = (
        f"import runpy, sys; sys.path.insert(0, '{PROGRAMS}');"
        f"sys.argv[0] = '{PROGRAM}'; runpy.run_path('{PROGRAM}', run_name='__main__')"
    )
    ranks = [
        forks.start(code, *words, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(size)
    ]
    all_end_well(ranks, 120.0)
