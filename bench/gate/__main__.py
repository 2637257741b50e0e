"""The cost of the node gate before a healthy job: ``python -m bench.gate`` (root).

Case ``gate``: wall time of the whole prolog, interpreter start to exit, on a node of a lab with 8
emulated GPUs, as slurmd would run it; beside it, in turn and on the same node, peers where they
are present. Case ``checks``: milliseconds of each family of checks, by the gate's own clock.

Peers: ``BENCH_NHC`` is a checkout of mej/nhc, ``BENCH_GCM`` the program health_checks of
facebookresearch/gcm; without them only our own numbers are printed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from bench.common import MIN_SAMPLES, REPOSITORY, BenchError, Results, main
from bench.gate.driver import NHC_CONF
from lab import Cluster

GPUS = 8
RUNS = 40
QUICK_RUNS = 3
LIMIT = 600.0


def gate(results: Results) -> None:
    """Seconds from exec to exit of the healthy prolog, and of peers' checks beside it."""
    runs = _runs(results)
    found = _on_a_node("total", runs)
    results.settings["conditions"] = found["conditions"]
    results.settings["families"] = found["families"]
    results.add("gate.total_s", found["robust"], "s")
    results.add("gate.interpreter_s", found["interpreter"], "s")
    for peer, text in (("nhc", f"{len(NHC_CONF)} checks"), ("gcm", "1 check")):
        if peer in found:
            results.settings[peer] = text
            results.add(f"{peer}.total_s", found[peer], "s")
            results.ratio(f"gate/{peer}", "gate.total_s", f"{peer}.total_s")


def checks(results: Results) -> None:
    """Milliseconds per family of checks in the prolog; they overlap with NVML's collection."""
    found = _on_a_node("checks", _runs(results))
    for family, samples in sorted(found["families"].items()):
        results.add(f"check.{family}_ms", samples, "ms")
    results.add("check.all_ms", found["all"], "ms")


def _runs(results: Results) -> int:
    return results.runs or (QUICK_RUNS if results.quick else max(RUNS, MIN_SAMPLES))


def _on_a_node(what: str, runs: int) -> dict[str, Any]:
    """Run bench.gate.driver as root on a compute node; what it measured."""
    peers = {name: os.environ[name] for name in ("BENCH_NHC", "BENCH_GCM") if name in os.environ}
    visible = [str(Path(path)) for path in peers.values()]
    with Cluster(nodes=1, standby=0, gpus=GPUS, visible=visible) as lab:
        argv = [sys.executable, "-m", "bench.gate.driver", what, str(runs)]
        env = {"PYTHONPATH": str(REPOSITORY), **peers}
        done = lab.exec("n1", argv, user=False, env=env, cwd=REPOSITORY, timeout=LIMIT)
        if done.returncode != 0:
            raise BenchError(f"bench.gate.driver: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


CASES = {"gate": gate, "checks": checks}

if __name__ == "__main__":
    raise SystemExit(main("gate", CASES))
