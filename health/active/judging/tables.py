"""The results of a run of active tests, for a person and for a program. Imports rich."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from health.active.judging import fleet
from health.active.judging.fleet import Baselines
from health.active.judging.profiles import Floors
from health.active_tests import LEVELS, TESTS, Judged, Measured
from robust_slurm.command_line.screen import plain_table
from robust_slurm.slurm.values import fold
from robust_slurm.text import counted

PASSED, FAILED, UNTESTED = 0, 1, 3
MOST_ROWS = 400  # beyond it only what did not pass is shown
_STYLES = {"ok": "green", "slow": "yellow", "error": "magenta"}


class TableRow(NamedTuple):
    """One line of the table: one value of one test on one device."""

    node: str
    device: str
    test: str
    result: str
    value: str
    limit: str


def _as_json(judged: Judged) -> str:
    """All of it."""
    found = {
        "findings": {n: [f.as_dict() for f in found] for n, found in judged.findings.items()},
        "named": {node: list(lines) for node, lines in judged.named.items()},
        "cleared": sorted(judged.cleared),
        "errors": {node: list(lines) for node, lines in judged.errors.items()},
        "left_out": list(judged.left_out),
        "seconds": round(judged.seconds, 3),
        "measured": [one.as_dict() for one in judged.measured],
    }
    return json.dumps(found, indent=1)


def exit_code(judged: Judged, nodes: Sequence[str]) -> int:
    if judged.named:
        return FAILED
    return PASSED if judged.cleared.issuperset(nodes) else UNTESTED


def show(
    judged: Judged,
    nodes: Sequence[str],
    baselines: Baselines,
    floors: Floors,
    out: Console,
    as_json: bool = False,
) -> None:
    """The table, then the verdict; or all of it as JSON on stdout."""
    if as_json:
        print(_as_json(judged), flush=True)
        return
    devices = fleet.devices_of(judged.measured, judged.devices)
    made = [
        row
        for one in judged.measured
        for row in rows(one, judged, baselines, floors, devices[one.node])
    ]
    shown = made if len(made) <= MOST_ROWS else [row for row in made if row.result != "ok"]
    if shown:
        table = plain_table("NODE", "DEVICE", "TEST", "RESULT", "VALUE", "LIMIT")
        for row in shown:
            style = _STYLES.get(row.result, "red")
            table.add_row(
                row.node, row.device, row.test, Text(row.result, style), row.value, row.limit
            )
        out.print(table)
    if len(shown) < len(made):
        out.print(f"{len(made) - len(shown)} values that passed are not shown; --json has them")
    if made:
        out.print()
    for line in verdict(judged, nodes):
        out.print(line, soft_wrap=True)


def rows(
    one: Measured, judged: Judged, baselines: Baselines, floors: Floors, devices: int
) -> Iterator[TableRow]:
    """The lines of one measurement, of a node with so many devices: at least one."""
    if one.test == "worker":
        return
    result, device = _result(one, judged), one.device
    if one.peers:
        device = "with " + fold([peer for peer in one.peers if peer != one.node])
    for name, value in sorted(one.values.items()):
        spread = baselines.usual(one, name, devices)
        floor = floors(one.model, name) if not one.peers else None
        least = floor.limit if floor else fleet.limit(spread) if spread else None
        limit = "" if least is None else f"{least:.4g}"
        yield TableRow(one.node, device, one.test, result, f"{name} {value:.4g}", limit)
    if not one.values:
        text = one.error or "; ".join(one.wrong)
        text = text or (counted(len(one.digests), "digest") if one.digests else "")
        yield TableRow(one.node, device, one.test, result, text[:120], "")


def _result(one: Measured, judged: Judged) -> str:
    """Return the result in a word; a pair that is slow is "ok", as it does not judge its nodes."""
    if one.error:
        return "error"
    if one.wrong:
        return "wrong"
    of_node = judged.findings.get(one.node, ())
    checks = {f.check for f in of_node if f.device == one.device and f.status != "PASS"}
    if one.test == "pair":
        return "ok"
    if one.test == "bitwise" and "active-bitwise-differs" in {f.check for f in of_node}:
        return "differs"
    return "slow" if f"active-{one.test}-slow" in checks else "ok"


def verdict(judged: Judged, nodes: Sequence[str]) -> list[str]:
    """Lines for bad nodes and why, nodes not tested, tests left out; a summary last."""
    lines = [f"{node} is bad: {'; '.join(why)}" for node, why in judged.named.items()]
    for node, found in judged.findings.items():
        lines += [f"{node}: {f.check}: {f.evidence}" for f in found if f.status == "WARN"]
    same: dict[tuple[str, ...], list[str]] = {}
    for node, why in judged.errors.items():
        same.setdefault(tuple(text.replace(node, "the node") for text in why), []).append(node)
    for of in same.values():
        lines.append(f"could not test {fold(of)}: {'; '.join(judged.errors[of[0]])}")
    lines += [f"skipped: {line}" for line in judged.left_out]
    passed = len(judged.cleared)
    rest = len(set(nodes) - judged.cleared - set(judged.named))
    total = f"{len(nodes)} nodes" if len(nodes) != 1 else nodes[0]
    lines.append(
        f"{total}: {passed} passed, {len(judged.named)} bad, {rest} not decided, "
        f"{judged.seconds:.1f} s"
    )
    return lines


def listing(out: Console) -> None:
    """The tests there are."""
    seconds = [f"{level} (s)" for level in LEVELS]
    table = plain_table("TEST", "WHAT IT DOES", *seconds, "ON", "NEEDS")
    for test in TESTS:
        seconds = [f"{test.seconds[level]:g}" for level in LEVELS]
        needs = ", ".join(sorted(test.needs))
        table.add_row(test.name, test.summary, *seconds, test.scope, needs)
    table.add_row(
        "dcgm",
        "NVIDIA's `dcgmi diag -r 1`, 2 or 3 (4: --dcgm-level)",
        "10",
        "120",
        "600",
        "node",
        "dcgmi, exclusive",
    )
    table.add_row(
        "nccl-tests",
        "NVIDIA's all_reduce_perf and alltoall_perf on a node's GPUs",
        *("5", "5", "5", "node", "nccl-tests, exclusive"),
    )
    out.print(table)


def listing_json() -> str:
    """Return the tests there are, as JSON."""
    rows = [
        {
            "test": test.name,
            "summary": test.summary,
            "seconds": {str(level): of for level, of in test.seconds.items()},
            "scope": test.scope,
            "needs": sorted(test.needs),
        }
        for test in TESTS
    ]
    return json.dumps({"version": 1, "tests": rows}, indent=1)
