"""The node's data process is killed while ranks train: the longest that one of them waits."""

from __future__ import annotations

import contextlib
import random
import time

from bench.common import MIN_SAMPLES, Results, summarise
from bench.data import sides
from bench.data.process import Kept

RANKS = 2
STEP = 0.1  # s of computing
IMPORT = 0.5  # s that the plan's module takes, as with a tokenizer's library
STEPS = 40  # around each kill: more than are ahead of it
CASES = {"kept": False, "forgotten": True}
"""Whether the steps of the process that dies are forgotten, as before they were kept."""


def loader_kill(results: Results) -> None:
    """Kill it again and again in the midst of the ranks' steps."""
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    chance = random.Random(24)
    for name, forget in CASES.items():
        waits: list[float] = []
        with sides.corpus(8, 4, 100) as corpus, contextlib.ExitStack() as stack:
            scratch = corpus.root.parent
            kept = stack.enter_context(Kept(scratch / "run", forget=forget))
            told = sides.spec(corpus, sides.OURS, import_s=IMPORT)
            ranks = [
                stack.enter_context(
                    sides.child({**told, "rank": rank, "world": RANKS}, scratch, kept)
                )
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
        del waits[0]  # the first death of a process forgets nothing
        results.metrics[f"loader_kill.{name}.longest_wait_s"] = summarise(waits, "s")
    results.settings["loader_kill"] = (
        f"{RANKS} ranks, steps of {STEP} s, a plan that takes {IMPORT} s to import, {runs} kills"
    )
