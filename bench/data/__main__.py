"""Data loading beside others': ``python -m bench.data``.

``BENCH_RAY``: the python of an environment with ``ray[data]``; without it Ray Data is not run.
See docs/bench.md for what is measured and what flatters whom.
"""

from __future__ import annotations

import os

from bench.common import Results, finish, parser, results_for
from bench.data.balance import balance
from bench.data.exact import exact
from bench.data.memory import memory
from bench.data.restart import loader_kill, restart
from bench.data.sides import say_versions
from bench.data.small_rows import small_rows
from bench.data.throughput import throughput, throughput_outside

CASES = {
    "balance": balance,
    "throughput": throughput,
    "throughput_outside": throughput_outside,
    "small_rows": small_rows,
    "memory": memory,
    "restart": restart,
    "loader_kill": loader_kill,
    "exact": exact,
}
GOALS = {
    "balance_8.ours.ranks": 1.05,
    "exact.wrong": 0.0,
    "exact.lost": 0.0,
    "exact.repeated": 0.0,
    "exact.other_steps": 0.0,
}
"""Metrics that no load of the machine changes: the most that each may be."""
QUIET_GOALS = {
    "memory.ours/stateful.loaders_mb": 0.25,
    "restart.ours.first_batch_s": 0.010,
    "loader_kill.longest_wait_s": 0.1,
}
"""The same of metrics and ratios on a machine with nothing else to do."""
QUIET_LEAST = {
    "throughput.ours/stateful": 1.0,
    "throughput_outside.ours/stateful": 1.0,
    "small_rows.ratio": 1.0,
}
"""The least that each may be there."""
QUIET = 2.0  # load average of the last minute, before the first case


def missed(results: Results, load: float = QUIET) -> list[str]:
    """Return the goals that were not reached. ``load``: of the machine, before the run."""
    found = {name: each.median for name, each in results.metrics.items()} | results.ratios
    quiet = load < QUIET and not results.quick
    most = GOALS | (QUIET_GOALS if quiet else {})
    least = QUIET_LEAST if quiet else {}
    said = [
        f"{name}: {found[name]:g}, more than {goal:g}"
        for name, goal in most.items()
        if found.get(name, goal) > goal
    ]
    return said + [
        f"{name}: {found[name]:g}, less than {goal:g}"
        for name, goal in least.items()
        if found.get(name, goal) < goal
    ]


def main() -> int:
    """Run the chosen cases. The exit code is 1 if a goal was missed."""
    args = parser("data", CASES).parse_args()
    results = results_for("data", args)
    load = os.getloadavg()[0]
    results.settings["load before"] = round(load, 2)
    say_versions(results)
    for case in args.case or CASES:
        CASES[case](results)
    code = finish(results, args)
    for line in missed(results, load):
        print(line)
        code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
