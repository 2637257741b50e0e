"""Small rows in the training process: ours beside torch's DataLoader without workers.

Both read the same files of documents that are tokenised already, of about 40 tokens, in the same
mixture, and pack them into batches of the same shape and arrays. Each side is one process, which
is stopped while it is the other's turn. Ours is a plan as an object, without a data process.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import MIN_SAMPLES, Results
from bench.data import sides, throughput
from bench.data.child import signal_all
from bench.data.corpus import JSONL, MARK, PARQUET, VOCABULARY
from bench.data.packing import Packer, padded

MIX = {"web": 0.7, "code": 0.3}
FILES, DOCUMENTS = 4, 10_000  # of each source, of each file
MEDIAN, SIGMA, LONGEST = 30, 0.8, 400  # tokens of a document, lognormal
PACK, ROWS = 1024, 8
TAKE = 300  # batches of a turn
FIRST = 2 * TAKE  # of the first one, which is not measured
CASES = {"small_rows": JSONL, "small_rows_parquet": PARQUET}


def small_rows(results: Results) -> None:
    """Compare with JSON Lines, and with Parquet."""
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as root:
        make(Path(root), DOCUMENTS // (10 if results.quick else 1))
        for case, form in CASES.items():
            _turns(results, case, Path(root), form, runs)
    results.settings["small_rows"] = f"{ROWS} rows of {PACK}, documents of {MEDIAN} tokens"


def make(root: Path, documents: int, seed: int = 0) -> None:
    """Write the same documents in both formats. The first token of each is its number."""
    import pyarrow
    from pyarrow import parquet

    chance, number = random.Random(seed), 0
    for source in MIX:
        for part in range(FILES):
            rows = []
            for _ in range(documents):
                length = max(4, min(LONGEST, round(MEDIAN * chance.lognormvariate(0.0, SIGMA))))
                tokens = [chance.randrange(VOCABULARY) for _ in range(length - 1)]
                rows.append([MARK + number, *tokens])
                number += 1
            name = root / f"{source}-{part}"
            lines = (json.dumps({"tokens": row}) + "\n" for row in rows)
            name.with_suffix(f".{JSONL}").write_text("".join(lines))
            column = pyarrow.array(rows, pyarrow.list_(pyarrow.int32()))
            parquet.write_table(pyarrow.table({"tokens": column}), f"{name}.{PARQUET}")


def opened(spec: dict[str, Any]) -> Any:
    """Return a side's loader."""
    if spec["side"] == sides.OURS:
        return _ours(Path(spec["root"]), spec["small"])
    return _plain(Path(spec["root"]), spec["small"])


def _ours(root: Path, form: str) -> Any:
    from robust_slurm import data

    read: Any = {JSONL: data.jsonl, PARQUET: data.parquet}[form]
    sources = {name: read(str(root / f"{name}-*.{form}")) for name in MIX}
    return data.Loader(data.Plan(sources, mix=MIX, pack=PACK, batch=ROWS, seed=7))


def _plain(root: Path, form: str) -> Any:
    """Return a DataLoader as a user writes it. Files are shuffled, records are not."""
    import numpy
    import torch.utils.data

    def documents(name: str, epoch: int) -> Iterator[Any]:
        files = sorted(root.glob(f"{name}-*.{form}"))
        random.Random(f"{name} {epoch}").shuffle(files)
        for file in files:
            if form == JSONL:
                with file.open("rb") as lines:
                    for line in lines:
                        yield numpy.array(json.loads(line)["tokens"], dtype=numpy.int32)
            else:
                from pyarrow import parquet

                with parquet.ParquetFile(file) as table:
                    for group in table.iter_batches(64):
                        for row in group.to_pylist():
                            yield numpy.array(row["tokens"], dtype=numpy.int32)

    def endless(name: str) -> Iterator[Any]:
        epoch = 0
        while True:
            yield from documents(name, epoch)
            epoch += 1

    class Rows(torch.utils.data.IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            chance, packer = random.Random(7), Packer(PACK)
            streams = {name: endless(name) for name in MIX}
            names, shares = list(MIX), list(MIX.values())
            while True:
                (name,) = chance.choices(names, shares)
                for row in packer.add(next(streams[name])):
                    yield padded(row, PACK)

    return torch.utils.data.DataLoader(Rows(), batch_size=ROWS, num_workers=0)


def _turns(results: Results, case: str, root: Path, form: str, runs: int) -> None:
    names = (sides.OURS, sides.DATALOADER)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    take, first = (TAKE // 10, FIRST // 10) if results.quick else (TAKE, FIRST)
    with ExitStack() as stack:
        told = {"root": str(root), "sources": 0, "files": 0, "documents": 0, "small": form}
        more = {"rank": 0, "world": 1, "rows": ROWS, "workers": 0}
        ranks = {
            name: stack.enter_context(sides.child({**told, **more, "side": name}, root))
            for name in names
        }
        for rank in ranks.values():
            rank.ready()
            rank.ask("open")
            signal_all([rank.pid], signal.SIGSTOP)
        for run in range(runs + 1):
            for name, rank in ranks.items():
                works = partial(throughput._of_side, rank, None)
                order = f"take {take if run else first}"
                sample = throughput._measured(rank, order, works, stopped=True)
                if run:
                    found[name].append(sample)
    for name, samples in found.items():
        throughput._add(results, f"{case}.{name}", samples)
    ours, plain = ([each["tokens_per_s"] for each in found[name]] for name in names)
    results.ratios[f"{case}.ratio"] = statistics.median(map(_ratio, ours, plain))
    cpu = [[each["cpu_s_per_mtoken"] for each in found[name]] for name in names]
    results.ratios[f"{case}.cpu_ratio"] = statistics.median(map(_ratio, cpu[1], cpu[0]))


def _ratio(one: float, other: float) -> float:
    return one / other
