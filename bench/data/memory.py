"""Memory of a node: 50 sources, 8 ranks."""

from __future__ import annotations

import contextlib
import time

from bench.common import Results
from bench.data import sides
from bench.data.child import pss_mb, tree
from bench.data.process import Kept, shared_mb

RANKS, SOURCES = 8, 50
FILES = 4  # of a source: as many as it has lanes by default
BATCHES = 72  # the data process holds as many steps then as it ever does
FILL = 1.0  # s for buffers to fill


def memory(results: Results) -> None:
    """Take the ranks' memory before they open their loaders and when these are busy."""
    ranks, batches = (2, 8) if results.quick else (RANKS, BATCHES)
    with sides.corpus(SOURCES, FILES, 20 if results.quick else 200) as corpus:
        for name in (sides.OURS, sides.STATEFUL):
            with contextlib.ExitStack() as stack:
                kept = stack.enter_context(Kept(corpus.root.parent / f"run-{name}"))
                children = [
                    stack.enter_context(sides.child(told, corpus.root.parent, kept))
                    for told in (
                        sides.spec(corpus, name, rank=rank, world=ranks) for rank in range(ranks)
                    )
                ]
                for child in children:
                    child.ready()
                pids = [child.pid for child in children]
                before = pss_mb(tree(pids))
                for order in ("open", *["take 1"] * batches):  # in step, as a training
                    for child in children:
                        child.tell(order)
                    for child in children:
                        child.answer()
                time.sleep(FILL)
                below = kept.below()
                family = [*tree(pids), *below]
                total = pss_mb(family) + shared_mb(below)
                results.once(f"memory.{name}.node_mb", total, "MB")
                results.once(f"memory.{name}.loaders_mb", total - before, "MB")
                results.once(f"memory.{name}.processes", len(family) - len(pids), "count")
    for what in ("node_mb", "loaders_mb"):
        results.ratio(
            f"memory.ours/stateful.{what}", f"memory.ours.{what}", f"memory.stateful.{what}"
        )
    results.settings["memory"] = (
        f"{SOURCES} sources of {FILES} files, {ranks} ranks, of peers {sides.WORKERS} workers each"
        f", after {batches + 1} batches"
    )
