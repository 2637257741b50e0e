"""Data loading beside others': ``python -m bench.data``.

``BENCH_RAY``: the python of an environment with ``ray[data]``; without it Ray Data is not run.
See docs/bench.md for what is measured and what flatters whom.
"""

from __future__ import annotations

from bench.common import Results, finish, parser, results_for
from bench.data.balance import balance
from bench.data.exact import exact
from bench.data.loader_kill import loader_kill
from bench.data.memory import memory
from bench.data.restart import restart
from bench.data.sides import say_versions
from bench.data.throughput import throughput, throughput_outside

CASES = {
    "balance": balance,
    "throughput": throughput,
    "throughput_outside": throughput_outside,
    "memory": memory,
    "restart": restart,
    "loader_kill": loader_kill,
    "exact": exact,
}
GOALS = {
    "balance_8.ours.ranks": 1.05,
    "exact.lost": 0.0,
    "exact.repeated": 0.0,
    "exact.other_steps": 0.0,
}
"""Metrics that no load of the machine changes: the most that each may be."""


def missed(results: Results) -> list[str]:
    """Return the goals that were not reached."""
    return [
        f"{name}: {results.metrics[name].median:g}, more than {most:g}"
        for name, most in GOALS.items()
        if name in results.metrics and results.metrics[name].median > most
    ]


def main() -> int:
    """Run the chosen cases. The exit code is 1 if a sample was lost, or the balance missed."""
    args = parser("data", CASES).parse_args()
    results = results_for("data", args)
    say_versions(results)
    for case in args.case or CASES:
        CASES[case](results)
    code = finish(results, args)
    for line in missed(results):
        print(line)
        code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())
