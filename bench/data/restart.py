"""Deaths: from a rank's restart until it has its first batch; waits as the data process dies."""

from __future__ import annotations

import contextlib
import random
import time

from bench.common import MIN_SAMPLES, Results, summarise
from bench.data import sides
from bench.data.process import Kept

SKIP = 100  # batches that a loader without a state passes over
SKIPS = 3  # times that it does
RANKS = 2
STEP = 0.1  # s of computing
IMPORT = 0.5  # s that the plan's module takes, as with a tokenizer's library
STEPS = 60  # around each kill: more than are ahead of it


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


def loader_kill(results: Results) -> None:
    """Kill it again and again in the midst of the ranks' steps."""
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    chance = random.Random(24)
    waits: list[float] = []
    with sides.corpus(8, 4, 100) as corpus, contextlib.ExitStack() as stack:
        scratch = corpus.root.parent
        kept = stack.enter_context(Kept(scratch / "run"))
        told = sides.spec(corpus, sides.OURS, import_s=IMPORT)
        ranks = [
            stack.enter_context(sides.child({**told, "rank": rank, "world": RANKS}, scratch, kept))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.ready()
        for order in ("open", *[f"train {STEPS} {STEP}"] * (runs + 1)):
            for rank in ranks:
                rank.tell(order)
            if order != "open":
                time.sleep(chance.uniform(0.0, 1.0))
                kept.kill()
            answers = [rank.answer() for rank in ranks]
            if order != "open":
                waits.append(max(answer["longest_s"] for answer in answers))
    del waits[0]  # a warm-up
    results.metrics["loader_kill.longest_wait_s"] = summarise(waits, "s")
    results.settings["loader_kill"] = (
        f"{RANKS} ranks, steps of {STEP} s, a plan that takes {IMPORT} s to import, {runs} kills"
    )
