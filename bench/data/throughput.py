"""Tokens per second of one rank that does nothing else than read.

The sides take turns, and all processes of a side are stopped while it is another's turn: nobody
works ahead in the meantime.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from functools import partial

from bench.common import MIN_SAMPLES, Metric, Results, summarise
from bench.data import sides
from bench.data.child import Child, cpu_seconds, signal_all, tree
from bench.data.keeper import Kept

TAKE = 24  # batches of a turn
PASSES = 3  # of Ray Data


def throughput(results: Results) -> None:
    """Let all sides but Ray take turns; then Ray passes over the corpus."""
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    names = (sides.OURS, sides.STATEFUL, sides.DATALOADER)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    documents = 100 if results.quick else 500
    with sides.corpus(8, 4, documents) as corpus, contextlib.ExitStack() as stack:
        scratch = corpus.root.parent
        kept = stack.enter_context(Kept(scratch / "run"))
        ranks = {
            name: stack.enter_context(sides.child(sides.spec(corpus, name), scratch, kept))
            for name in names
        }
        works: dict[str, Callable[[], list[int]]] = {
            name: partial(_of_side, rank, kept if name == sides.OURS else None)
            for name, rank in ranks.items()
        }
        for name, rank in ranks.items():
            rank.ready()
            rank.ask("open")
            signal_all(works[name](), signal.SIGSTOP)
        for run in range(runs + 1):
            for name, rank in ranks.items():
                signal_all(works[name](), signal.SIGCONT)
                sample = _measured(rank, f"take {TAKE}", works[name])
                signal_all(works[name](), signal.SIGSTOP)
                if run:  # in the first turn, buffers fill
                    found[name].append(sample)
        stack.close()
        for name, samples in found.items():
            _add(results, name, samples)
        if sides.RAY:
            with sides.child(sides.spec(corpus, sides.RAY_DATA), scratch) as rank:
                rank.ready()
                results.once("throughput.ray.first_s", rank.ask("open")["seconds"], "s")
                passes = 1 if results.quick else PASSES
                samples = [
                    _measured(rank, "pass", partial(_of_side, rank, None)) for _ in range(passes)
                ]
                _add(results, sides.RAY_DATA, samples)
    for name in (*names[1:], *([sides.RAY_DATA] if sides.RAY else [])):
        for what in ("tokens_per_s", "samples_per_s"):
            results.ratio(
                f"throughput.ours/{name}.{what}",
                f"throughput.ours.{what}",
                f"throughput.{name}.{what}",
            )
        cpu = "cpu_s_per_mtoken"
        results.ratio(
            f"throughput.{name}/ours.{cpu}", f"throughput.{name}.{cpu}", f"throughput.ours.{cpu}"
        )
    results.settings["batch"] = f"{sides.ROWS} rows of 4096 tokens"
    results.settings["workers of each peer's rank"] = sides.WORKERS


def _of_side(rank: Child, kept: Kept | None) -> list[int]:
    """Return all processes that work for this rank."""
    return [*tree([rank.pid]), *(kept.below() if kept else [])]


def _measured(rank: Child, order: str, works: Callable[[], list[int]]) -> dict[str, float]:
    before = cpu_seconds(works())
    answer = rank.ask(order)
    cpu = cpu_seconds(works()) - before
    return {
        "tokens_per_s": answer["tokens"] / answer["seconds"],
        "samples_per_s": answer["documents"] / answer["seconds"],
        "cpu_s_per_mtoken": cpu / answer["tokens"] * 1e6,
    }


def _add(results: Results, name: str, samples: list[dict[str, float]]) -> None:
    units = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s", "cpu_s_per_mtoken": "s"}
    for what, unit in units.items():
        metric: Metric = summarise([sample[what] for sample in samples], unit)
        results.metrics[f"throughput.{name}.{what}"] = metric
