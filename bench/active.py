"""Precision of active tests, which must name the bad nodes only: ``python -m bench.active`` (root).

A lab of 8 nodes. In each run one node's link is limited (tc) and another node's torch computes
matrix products wrongly (``tests/programs/wrong``), other ones each time; ``robust-health test`` is
run on all of them in a job, with real torch on CPUs. Case ``named``: both broken; ``healthy``:
nothing broken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.common import MIN_SAMPLES, REPOSITORY, Results, main
from lab import Cluster

NODES = 8
SLOW = "100mbit"
TESTS = ("bitwise", "gemm", "pair")
LIMIT = 120.0  # s

WRONG = REPOSITORY / "tests" / "programs" / "wrong"


def run(lab: Cluster, wrong: str = "") -> dict[str, Any]:
    """Return the answer of one ``robust-health test`` on all nodes; ``wrong``: the bad node."""
    switch = lab.shared / "wrong"
    switch.touch()
    env = {
        "PYTHONPATH": f"{WRONG}:{REPOSITORY}",
        "LAB_WRONG": "flip",
        "LAB_WRONG_NODE": wrong or "-",
        "LAB_WRONG_FILE": str(switch),
        "OMP_NUM_THREADS": "1",
    }
    words = ["salloc", "-Q", f"-N{NODES}", "--exclusive", "robust-health", "test", *TESTS]
    words += ["--nodes", "all", "--json", "--limit", f"{LIMIT:g}"]
    done = lab.exec("head", words, env=env, timeout=2 * LIMIT)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        sys.exit(f"bench.active: robust-health test: {done.returncode}: {done.stderr[-2000:]}")


@contextmanager
def slowed(lab: Cluster, node: str) -> Iterator[None]:
    lab.slow(node, SLOW)
    try:
        yield
    finally:
        lab.heal(node)


def _count(results: Results) -> int:
    return results.runs or (2 if results.quick else MIN_SAMPLES)


def _add(results: Results, case: str, found: list[dict[str, Any]], right: list[float]) -> None:
    results.add(f"{case}.total_s", [one["seconds"] for one in found], "s")
    results.add(f"{case}.exact", right, "of runs")
    results.add(f"{case}.errors", [float(len(one["errors"])) for one in found], "nodes")


def named(results: Results) -> None:
    """Both faults at once, on other nodes each time."""
    found, right, healthy = [], [], []
    pace: dict[bool, list[float]] = {True: [], False: []}
    with Cluster(nodes=NODES, standby=0) as lab:
        for number in range(_count(results)):
            wrong, slow = (
                f"n{3 * number % NODES + 1}",
                f"n{(3 * number + 1 + number // NODES) % NODES + 1}",
            )
            with slowed(lab, slow):
                one = run(lab, wrong)
            blamed = set(one["named"])
            found.append(one)
            right.append(float(blamed == {wrong, slow}))
            healthy.append(float(len(blamed - {wrong, slow})))
            for measured in one["measured"]:
                if measured["test"] == "pair" and "values" in measured:
                    pace[slow in measured["peers"]].append(measured["values"]["busbw_gbps"] * 1e3)
            print(
                f"named {number + 1}: wrong {wrong}, slow {slow}: named {sorted(blamed)}",
                flush=True,
            )
    _add(results, "named", found, right)
    results.add("named.healthy_named", healthy, "nodes")
    results.add("named.pair_slow_mb_s", pace[True], "MB/s")
    results.add("named.pair_good_mb_s", pace[False], "MB/s")
    results.settings["named.slow"] = SLOW
    results.settings["named.exact_runs"] = f"{sum(right):g} of {len(right)}"


def healthy(results: Results) -> None:
    """Break nothing: nobody may be named, everybody is cleared."""
    found, right = [], []
    with Cluster(nodes=NODES, standby=0) as lab:
        for number in range(_count(results)):
            one = run(lab)
            found.append(one)
            right.append(float(not one["named"] and len(one["cleared"]) == NODES))
            print(f"healthy {number + 1}: named {sorted(one['named'])}", flush=True)
    _add(results, "healthy", found, right)
    results.settings["healthy.exact_runs"] = f"{sum(right):g} of {len(right)}"


CASES = {"named": named, "healthy": healthy}

if __name__ == "__main__":
    raise SystemExit(main("active", CASES))
