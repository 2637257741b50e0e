"""The corpus in Ray Data: read, tokenised by its workers, packed where it arrives.

Runs in an interpreter of its own, which need not have torch or anything of this repository's.
Ray Data mixes sources evenly as they come (``union``): it knows no weights, and no state to resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.data.corpus import PARQUET, Corpus, kind, tokenise
from bench.data.packing import Packer, padded

DOCUMENTS = 64  # of a batch of Ray's


class Documents:
    """Every iteration is one pass over the corpus: Ray begins to work when it begins, and works
    ahead as far as its object store goes."""

    def __init__(self, corpus: Corpus, rows: int, workers: int) -> None:
        import ray

        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        files = [(kind(name), [str(at) for at in corpus.paths(name)]) for name in corpus.names()]
        parts = [
            ray.data.read_parquet(paths)
            if what == PARQUET
            else ray.data.read_json(paths, lines=True)
            for what, paths in files
        ]
        self._all = parts[0].union(*parts[1:]).map_batches(_tokenise, batch_size=DOCUMENTS)
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import numpy

        packer = Packer()
        ready: list[dict[str, Any]] = []
        for batch in self._all.iter_batches(
            batch_size=DOCUMENTS, prefetch_batches=4, batch_format="numpy"
        ):
            for tokens in batch["tokens"]:
                ready += [padded(row) for row in packer.add(tokens)]
            while len(ready) >= self._rows:
                now, ready = ready[: self._rows], ready[self._rows :]
                yield {name: numpy.stack([row[name] for row in now]) for name in now[0]}


def _tokenise(batch: dict[str, Any]) -> dict[str, Any]:
    records = zip(batch["id"], batch["text"], strict=True)
    return {"tokens": [tokenise({"id": id_, "text": text})["tokens"] for id_, text in records]}
