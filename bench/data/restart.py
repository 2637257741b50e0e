"""From a rank's restart until it has its first batch."""

from __future__ import annotations

import contextlib

from bench.common import MIN_SAMPLES, Results, summarise
from bench.data import sides
from bench.data.process import Kept

SKIP = 100  # batches that a loader without a state passes over
SKIPS = 3  # times that it does


def restart(results: Results) -> None:
    """Kill a rank again and again; ours and the peers take turns."""
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    names = (sides.OURS, sides.STATEFUL, sides.DATALOADER)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
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
                passed = skip if name == sides.DATALOADER else 0
                if passed and not 0 < run <= SKIPS:
                    continue
                answer = rank.ask(f"again {scratch / name} {passed}")
                if run:
                    found[name].append(answer)
                else:
                    results.once(f"restart.{name}.very_first_s", answer["seconds"], "s")
    for name, samples in found.items():
        for what, key in (("first_batch_s", "seconds"), ("rank_cpu_s", "cpu_s")):
            values = summarise([sample[key] for sample in samples], "s")
            results.metrics[f"restart.{name}.{what}"] = values
    for name in names[1:]:
        results.ratio(
            f"restart.{name}/ours.first_batch",
            f"restart.{name}.first_batch_s",
            "restart.ours.first_batch_s",
        )
    results.settings["restart.dataloader"] = f"passes over {skip} batches"
