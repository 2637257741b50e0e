"""Tokens per second of one rank that does nothing else than read.

The sides take turns, and all processes of a side are stopped while it is another's turn: nobody
works ahead in the meantime.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from functools import partial

from bench.common import MIN_SAMPLES, BenchError, Results, summarise
from bench.data import sides
from bench.data.child import Child, cpu_seconds, signal_all, tree
from bench.data.corpus import Corpus
from bench.data.process import Kept

TAKE = 24  # batches of a turn
FIRST = 10 * TAKE  # of the first one, which is not measured: buffers fill, and readers are started
AHEAD = {"read_ahead": 8 << 20, "window": 64}
"""Bytes that ours reads ahead at most, and records that it shuffles together: less than by default,
or most of what is read would be in its buffers at the end, and not in the number of tokens."""
PASSES = 2  # of Ray Data
PEERS = (sides.STATEFUL, sides.DATALOADER)
UNITS = {"tokens_per_s": "tokens/s", "samples_per_s": "samples/s", "cpu_s_per_mtoken": "s"}


def throughput(results: Results) -> None:
    """Read with a tokenizer in Python; at last, let Ray Data pass over the corpus."""
    with sides.corpus(8, 4, 100 if results.quick else 500) as corpus:
        _turns(results, "throughput", corpus)
        if sides.RAY:
            try:
                _ray(results, corpus)
                _compare(results, "throughput", sides.RAY_DATA)
            except BenchError as error:  # it gives up early on a loaded machine
                results.settings["ray"] = f"{results.settings.get('ray')}; not measured: {error}"
    results.settings["batch"] = f"{sides.ROWS} rows of 4096 tokens"
    results.settings["throughput.ours"] = ", ".join(f"{key} {n}" for key, n in AHEAD.items())
    results.settings["workers of each peer's rank"] = sides.WORKERS


def throughput_outside(results: Results) -> None:
    """Read with a tokenizer that computes outside Python's lock, as those in Rust."""
    with sides.corpus(8, 4, 100 if results.quick else 500) as corpus:
        _turns(results, "throughput_outside", corpus, outside=True)


def _turns(results: Results, case: str, corpus: Corpus, outside: bool = False) -> None:
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    names = (sides.OURS, *PEERS)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    scratch = corpus.root.parent
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(Kept(scratch / f"run-{case}"))
        ranks = {
            name: stack.enter_context(
                sides.child(sides.spec(corpus, name, outside=outside, **AHEAD), scratch, kept)
            )
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
                order = f"take {TAKE if run else FIRST}"
                sample = _measured(rank, order, works[name], stopped=True)
                if run:
                    found[name].append(sample)
        results.settings[f"{case}.processes of ours"] = len(kept.below())
    for name, samples in found.items():
        _add(results, f"{case}.{name}", samples)
    for name in PEERS:
        _compare(results, case, name)


def _ray(results: Results, corpus: Corpus) -> None:
    """Add Ray Data's passes. BenchError if it does not start or end in time."""
    with sides.child(sides.spec(corpus, sides.RAY_DATA), corpus.root.parent) as rank:
        rank.ready()
        results.once("throughput.ray.first_s", rank.ask("open")["seconds"], "s")
        works = partial(_of_side, rank, None)
        passes = 1 if results.quick else PASSES
        _add(results, "throughput.ray", [_measured(rank, "pass", works) for _ in range(passes)])


def _of_side(rank: Child, kept: Kept | None) -> list[int]:
    """Return all processes that work for this rank. The one that keeps data processes is among
    them: it kills those that are stopped for 15 s of its own time."""
    return tree([rank.pid, *([kept.pid] if kept else [])])


def _measured(
    rank: Child, order: str, works: Callable[[], list[int]], *, stopped: bool = False
) -> dict[str, float]:
    """Have an order done. Those that are ``stopped`` go on for as long alone: to look through
    all processes takes a while, in which who has larger buffers would work ahead further."""
    pids = works()
    before = cpu_seconds(pids)
    if stopped:
        signal_all(pids, signal.SIGCONT)
    answer = rank.ask(order)
    if stopped:
        signal_all(pids, signal.SIGSTOP)
        signal_all(works(), signal.SIGSTOP)  # those that were started meanwhile
    cpu = cpu_seconds(works()) - before
    return {
        "tokens_per_s": answer["tokens"] / answer["seconds"],
        "samples_per_s": answer["documents"] / answer["seconds"],
        "cpu_s_per_mtoken": cpu / answer["tokens"] * 1e6,
    }


def _add(results: Results, name: str, samples: list[dict[str, float]]) -> None:
    for what, unit in UNITS.items():
        values = summarise([sample[what] for sample in samples], unit)
        results.metrics[f"{name}.{what}"] = values


def _compare(results: Results, case: str, peer: str) -> None:
    """Add how many times as fast ours is, and how many times as much CPU the peer takes."""
    rate, cpu = "tokens_per_s", "cpu_s_per_mtoken"
    results.ratio(f"{case}.ours/{peer}", f"{case}.ours.{rate}", f"{case}.{peer}.{rate}")
    results.ratio(f"{case}.{peer}/ours.cpu", f"{case}.{peer}.{cpu}", f"{case}.ours.{cpu}")
