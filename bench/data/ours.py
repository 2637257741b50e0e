"""The corpus by a plan of ours; the data process imports it by its name, ``bench.data.ours:plan``.

What the plan needs is in the environment, as a training's own settings may be.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.data.corpus import JSONL, PARQUET, Corpus, kind, tokenise, tokenise_outside
from bench.data.packing import PACK
from robust_slurm import data
from robust_slurm.data import steps
from robust_slurm.data.sources.base import SourceOptions

SPEC = "BENCH_DATA"
NAME = "bench.data.ours:plan"
SEED = 7


def make_plan(
    corpus: Corpus,
    *,
    world: int,
    rows: int,
    pack: int = PACK,
    outside: bool = False,
    window: int = SourceOptions().window,
) -> Any:
    """Return the plan: all sources by the mixture, rows balanced by attention's cost. ``outside``:
    with the tokenizer that several threads may call."""
    read: Mapping[str, Callable[..., Any]] = {JSONL: data.jsonl, PARQUET: data.parquet}
    decode = tokenise_outside if outside else tokenise
    weights = corpus.weights()
    return data.Plan(
        sources={
            name: read[kind(name)](
                corpus.pattern(name), decode=decode, parallel=outside, window=window
            )
            for name in weights
        },
        mix=lambda step: weights,
        cost=lambda meta: meta.tokens**2,
        pack=pack,
        batch=rows,
        mesh={"dp": world},
        seed=SEED,
    )


def environ(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a rank of this plan."""
    place = {"RANK": str(spec["rank"]), "WORLD_SIZE": str(spec["world"])}
    return {SPEC: json.dumps({**spec, "mesh": spec.get("mesh", spec["world"])}), **place}


def loader(corpus: Corpus, spec: Mapping[str, Any]) -> Any:
    """Return one rank's loader: of the node's data process if there is one, else in process."""
    return data.Loader(NAME)


def plan() -> Any:
    """Return the plan of ``SPEC``, and obey what is in it on reading ahead."""
    spec = json.loads(os.environ[SPEC])
    time.sleep(spec.get("import_s", 0.0))
    steps.READ_AHEAD = spec.get("read_ahead", steps.READ_AHEAD)
    corpus = Corpus(Path(spec["root"]), spec["sources"], spec["files"], spec["documents"])
    return make_plan(
        corpus,
        world=spec["mesh"],
        rows=spec["rows"],
        pack=spec.get("pack", PACK),
        outside=spec.get("outside", False),
        window=spec.get("window", SourceOptions().window),
    )
