"""Samples and tokens per second of one rank that does nothing else than read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from bench.common import MIN_SAMPLES, Metric, Results, summarise
from bench.data import sides
from bench.data.child import Child, cpu_seconds, tree
from bench.data.keeper import Kept

DRAIN, TAKE = 8, 16  # batches: what waits in the buffers is not counted
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
        for rank in ranks.values():
            rank.ready()
            rank.ask("open")
        for _ in range(runs):
            for name, rank in ranks.items():
                rank.ask(f"take {DRAIN}")
                extra = kept.below if name == sides.OURS else list
                found[name].append(_measured(rank, f"take {TAKE}", extra))
        stack.close()
        for name, samples in found.items():
            _add(results, name, samples)
        if sides.RAY:
            with sides.child(sides.spec(corpus, sides.RAY_DATA), scratch) as rank:
                rank.ready()
                results.once("throughput.ray.first_s", rank.ask("open")["seconds"], "s")
                passes = 1 if results.quick else PASSES
                _add(results, sides.RAY_DATA, [_measured(rank, "pass") for _ in range(passes)])
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


def _measured(rank: Child, order: str, others: Callable[[], list[int]] = list) -> dict[str, float]:
    """``others``: processes that work for this rank and are not below it."""
    before = cpu_seconds([*tree([rank.pid]), *others()])
    answer = rank.ask(order)
    cpu = cpu_seconds([*tree([rank.pid]), *others()]) - before
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
