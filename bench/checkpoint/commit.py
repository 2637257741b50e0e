"""Case ``commit`` of bench.checkpoint: one process commits a step of thousands of ranks.

Simulated are the ranks: what their writers leave in the step's directory is made here. They are
fully sharded (FSDP2) with Adam: of each parameter a rank has a block of the weight and of both
moments, and the optimizer's scalar step. Rows do not divide evenly. The commit is the one of the
writer process: it reads and checks every part, merges them and publishes the manifest. The data
files are holes of the right size: a commit does not read them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.checkpoint.nodes import scratch
from bench.common import BenchError, Results, summarise
from robust_slurm.checkpoint.durable import tier
from robust_slurm.checkpoint.durable.parts import (
    File,
    FileSpan,
    Part,
    Plain,
    data_prefix,
    encode_part,
    part_name,
)
from robust_slurm.checkpoint.format.layout import Entry, Snapshot

RANKS, PARAMETERS = 9600, 1000
QUICK_RANKS, QUICK_PARAMETERS = 256, 50
RUNS = 3
ATTEMPT, STEP = "1234.e0", 1000
COLUMNS = 512
RECORD = 1300  # bytes that torch.save adds to a tensor
STATE = ("weight", "exp_avg", "exp_avg_sq")


def commit(results: Results) -> None:
    """Seconds and memory of a commit; fewer runs than of other cases, as each takes long."""
    ranks, parameters = (QUICK_RANKS, QUICK_PARAMETERS) if results.quick else (RANKS, PARAMETERS)
    with scratch() as directory:
        make(directory, ranks, parameters)
        runs = [measure(directory, ranks) for _ in range(1 if results.quick else RUNS)]
    for key, unit in (("s", "s"), ("cpu_s", "s"), ("rss_gb", "GB")):
        results.metrics[f"commit_{ranks}.{key}"] = summarise([run[key] for run in runs], unit)
    results.settings[f"commit_{ranks}"] = (
        f"{ranks} simulated FSDP2 ranks, {parameters} parameters with Adam; files in memory; "
        f"said: {'; '.join(runs[0]['notes']) or 'nothing'}"
    )


def measure(directory: Path, ranks: int) -> dict[str, Any]:
    """Commit in a process of its own, as the writer does."""
    ran = subprocess.run(
        [sys.executable, "-m", "bench.checkpoint.commit", str(directory), str(ranks)],
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise BenchError(f"the commit failed: {ran.stderr.strip()[-1000:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    (tier.step_dir(directory, STEP) / tier.MANIFEST).unlink()
    return found


def make(directory: Path, ranks: int, parameters: int) -> None:
    """Write the files of all ranks."""
    where = tier.step_dir(directory, STEP)
    where.mkdir(parents=True)
    alike: dict[tuple[int, ...], tuple[Part, list[bytes]]] = {}
    for rank in range(ranks):
        counts = tuple(rows_of(rank, ranks, i)[1] for i in range(4))
        if counts not in alike:  # to encode each rank's part as a rank does would take an hour
            made = part(rank, ranks, parameters)
            alike[counts] = made, encode_part(made).split(b"\n", 4)
        made, (first, *rest) = alike[counts]
        name = f"{data_prefix(ATTEMPT, rank)}0.distcp"
        head = json.loads(first)
        size = head["files"][0][1]
        head |= {"rank": rank, "needs": [rank], "files": [[name, size, [rank]]]}
        begins = (rows_of(rank, ranks, i)[0] for i in range(parameters))
        head["offsets"] = [begin for begin in begins for _ in STATE]
        with open(where / name, "wb") as data:
            os.truncate(data.fileno(), size)
        raw = b"\n".join([json.dumps(head, separators=(",", ":")).encode(), *rest])
        (where / part_name(ATTEMPT, rank)).write_bytes(raw)


def part(rank: int, ranks: int, parameters: int) -> Part:
    """Return one rank's account of its blocks."""
    entries = list(blocks(rank, ranks, parameters))
    places, at = [], 0
    for entry in entries:
        places.append(FileSpan(0, at, entry.nbytes + RECORD))
        at += entry.nbytes + RECORD
    file = File(f"{data_prefix(ATTEMPT, rank)}0.distcp", at + RECORD, [rank])
    names = [f"layers.{i}.weight" for i in range(parameters)]
    values = {"optimizer": {"param_groups": [{"lr": 0.1, "params": names}]}, "loader": {"at": rank}}
    snapshot = Snapshot(
        STEP, rank, ranks, 0, "1234", {"dp": ranks}, (rank,), values, tuple(entries)
    )
    lr = "optimizer.param_groups.0.lr"
    return Part(
        ATTEMPT, snapshot, [0], (file,), tuple(places),
        {e.fqn: tuple(e.fqn.split(".", 1)) for e in entries},
        (Plain(lr, tuple(lr.split(".")), FileSpan(0, at, RECORD)),),
        (("optimizer.param_groups.0", tuple(names)),),
        ("=0000803f",) * parameters,
    )  # fmt: skip


def blocks(rank: int, ranks: int, parameters: int) -> Iterator[Entry]:
    for i in range(parameters):
        begin, count, rows = rows_of(rank, ranks, i)
        for name in (
            "model.layers.{}.weight",
            *(f"optimizer.state.layers.{{}}.weight.{k}" for k in STATE[1:]),
        ):
            fqn = name.format(i)
            yield Entry(fqn, "F32", (count, COLUMNS), fqn, (rows, COLUMNS), (begin, 0), "block")
        fqn = f"optimizer.state.layers.{i}.weight.step"
        yield Entry(fqn, "F32", (), fqn, (), (), "private")


def rows_of(rank: int, ranks: int, parameter: int) -> tuple[int, int, int]:
    """First row, rows, and all rows of a parameter: every fourth leaves some ranks without."""
    rows = 2 * ranks + (ranks // 2 if parameter % 4 == 3 else 0)
    each = -(-rows // ranks)
    begin = min(rank * each, rows)
    return begin, min(each, rows - begin), rows


def main(directory: str, ranks: str) -> int:
    """In the process that is measured: print seconds, of the clock and of the processor, and the
    highest resident size."""
    from robust_slurm.checkpoint.durable.commit import CommitRequest
    from robust_slurm.checkpoint.durable.commit import commit as commit_step

    request = CommitRequest(Path(directory), STEP, int(ranks), ATTEMPT, wait=0, keep=2)
    began, cpu = time.monotonic(), time.process_time()
    done = commit_step(request, threading.Event())
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"s": seconds, "cpu_s": cpu, "rss_gb": highest, "notes": done.notes}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
