"""The share of its time that a job of 9,600 GPUs would train: ``python -m bench.simulate``.

Holds the simulator against what others and we have measured: ByteRobust's ETTR and scheduling
times, and our own soaks. Exit code 1 if a goal is missed. See docs/simulate.md for what is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from bench.common import Results, finish, parser, results_for, summarise
from bench.simulate import assumed
from bench.simulate.approaches import APPROACHES, ours, p99_pool
from bench.simulate.checks import Check, show
from bench.simulate.events import Approach, Kind, SimulatedCluster, Time
from bench.simulate.lab import predictions
from bench.simulate.mixes import MIXES, scaled
from bench.simulate.paper import ettr_checks, was_checks
from bench.simulate.study import accounts

NODES, DAYS, GPUS = 1200, 90.0, 8
MIX = "byterobust"
GOAL = 0.995
RUNS, QUICK_RUNS = 100, 20


def _runs(results: Results) -> range:
    return range(results.runs or (QUICK_RUNS if results.quick else RUNS))


def _cluster(mix: Sequence[Kind], nodes: int = NODES) -> SimulatedCluster:
    refill, step = assumed.REFILL_H.median, assumed.STEP.median
    return SimulatedCluster(nodes, DAYS, p99_pool(mix, nodes, refill), refill, step)


def _add(
    results: Results, name: str, one: Approach, cluster: SimulatedCluster, mix: Sequence[Kind]
) -> None:
    ettrs = [account.ettr for account in accounts(one, cluster, mix, _runs(results))]
    results.metrics[f"{name}.ettr"] = summarise(ettrs, "share")


def approaches(results: Results) -> list[Check]:
    """All approaches at 9,600 GPUs; what ours loses by cause and by phase; the goal."""
    mix = MIXES[MIX][1]
    cluster = _cluster(mix)
    for name, make in APPROACHES.items():
        _add(results, name, make(NODES, cluster.step_s), cluster, mix)
    own = accounts(ours(NODES), cluster, mix, _runs(results))
    for part, what in ((0, "cause"), (1, "phase")):
        for key in sorted({key for one in own for key in one.by(part)}):
            hours = [one.by(part).get(key, 0.0) / 3600 * NODES * GPUS for one in own]
            name = f"ours.{what}.{key.replace(' ', '_').replace('/', '_')}"
            results.metrics[name] = summarise(hours, "GPU-hours")
    at_goal = sum(one.ettr >= GOAL for one in own) / len(own)
    results.once("ours.runs_at_goal", at_goal, "share")
    results.metrics["ours.worst_hour"] = summarise([one.worst() for one in own], "share")
    for size in (0, 1, 2, 4, 8, 16, 32):
        _add(results, f"ours.pool_{size}", ours(NODES), cluster._replace(pool=size), mix)
    results.settings |= {f"assumed: {name}": why for name, why in assumed.GUESSES}
    results.settings |= {"mix": MIXES[MIX][0], "pool": cluster.pool, "nodes": NODES, "days": DAYS}
    return [Check("ours.ettr", results.metrics["ours.ettr"].median, GOAL, at_least=True)]


def scenarios(results: Results) -> list[Check]:
    """Ours where a number that matters is another one."""
    mix = MIXES[MIX][1]
    cluster, own = _cluster(mix), ours(NODES)
    ten_minutes = assumed.assumed("a step of a minute came before", 600.0)
    changed: Mapping[str, tuple[Approach, SimulatedCluster, Sequence[Kind]]] = {
        "save_stall_20ms": (_stall(own, 0.020), cluster, mix),
        "save_stall_29ms": (_stall(own, 0.029), cluster, mix),
        "step_5s": (ours(NODES, 5.0), cluster._replace(step_s=5.0), mix),
        "hang_600s": (own._replace(detect={**own.detect, "hang": ten_minutes}), cluster, mix),
        "start_x2": (own._replace(start=own.start.times(2.0)), cluster, mix),
        "refill_72h": (own, cluster._replace(refill_h=72.0), mix),
        "faults_x2": (own, cluster, scaled(mix, 2.0)),
    }
    for name, (approach, where, kinds) in changed.items():
        _add(results, f"ours.{name}", approach, where, kinds)
    for name, (_, kinds) in MIXES.items():
        _add(results, f"ours.mix_{name}", own, _cluster(kinds), kinds)
    for nodes in (128, 512, 2048):
        _add(results, f"ours.nodes_{nodes}", ours(nodes), _cluster(mix, nodes), mix)
    return []


def _stall(approach: Approach, seconds: float) -> Approach:
    return approach._replace(save=Time(seconds, seconds, "assumed", "a scenario"))


def paper(results: Results) -> list[Check]:
    """ByteRobust's own figures, from its own tables."""
    mix = MIXES[MIX][1]
    return [*ettr_checks(results, _cluster(mix), mix, _runs(results)), *was_checks(results)]


def lab(results: Results) -> list[Check]:
    """The ETTR of our soaks, each from the faults that another one measured."""
    return predictions(results)


CASES: Mapping[str, Callable[[Results], list[Check]]] = {
    "approaches": approaches,
    "scenarios": scenarios,
    "paper": paper,
    "lab": lab,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and judge them. Returns the exit code."""
    args = parser("simulate", CASES).parse_args(argv)
    results = results_for("simulate", args)
    checks = [check for case in args.case or CASES for check in CASES[case](results)]
    for number, check in enumerate((one for one in checks if not one.fine), 1):
        results.settings[f"missed {number}"] = check.said
    code = finish(results, args)
    show(checks)
    return code or int(any(not check.fine for check in checks))


if __name__ == "__main__":
    raise SystemExit(main())
