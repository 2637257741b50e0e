"""From a rank's restart until it has its first batch."""

from __future__ import annotations

import contextlib

from bench.common import MIN_SAMPLES, Metric, Results, summarise
from bench.data import sides
from bench.data.keeper import Kept

SKIP = 100  # batches that a loader without a state passes over
SKIPS = 3  # times that it does


def restart(results: Results) -> None:
    """Kill a rank again and again; ours and the peers take turns."""
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    names = (sides.OURS, sides.STATEFUL, sides.DATALOADER)
    found: dict[str, list[float]] = {name: [] for name in names}
    skip = 10 if results.quick else SKIP
    with sides.corpus(8, 4, 100) as corpus, contextlib.ExitStack() as stack:
        scratch = corpus.root.parent
        kept = stack.enter_context(Kept(scratch / "run"))
        ranks = {
            name: stack.enter_context(sides.child(sides.spec(corpus, name), scratch, kept))
            for name in names
        }
        for rank in ranks.values():
            rank.ready()
        for run in range(runs + 1):  # the first starts from nothing
            for name, rank in ranks.items():
                if name == sides.DATALOADER:
                    if 0 < run <= SKIPS:
                        seconds = rank.ask(f"again {scratch / name} {skip}")["seconds"]
                        found[name].append(seconds)
                    continue
                seconds = rank.ask(f"again {scratch / name} 0")["seconds"]
                if run:
                    found[name].append(seconds)
                else:
                    results.once(f"restart.{name}.very_first_s", seconds, "s")
    for name, samples in found.items():
        metric: Metric = summarise(samples, "s")
        results.metrics[f"restart.{name}.first_batch_s"] = metric
    for name in names[1:]:
        results.ratio(
            f"restart.{name}/ours.first_batch",
            f"restart.{name}.first_batch_s",
            "restart.ours.first_batch_s",
        )
    results.settings["restart.dataloader"] = f"passes over {skip} batches"
