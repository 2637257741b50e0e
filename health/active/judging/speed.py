"""Devices that are too slow: by a floor, the fleet's record, or the others of the run. Pure.

A floor names a node, except a published one of a value that depends on the host as well. What all
nodes of a run show at once (a power cap, a hot room, a floor that does not fit) only warns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from health.active.judging import fleet
from health.active.judging.alignment import EVERYBODY
from health.active.judging.profiles import Floors
from health.active_tests import Measured

SUFFIXES = ("_tflops", "_gbps")  # of values that are speeds: more is better
# Of the median of the run's devices. Lower than the fleet's: only a few, measured once.
RUN_FAIL = 0.5
RUN_LEAST = 5  # of the same kind: the median holds while two of them are bad
RUN_FEW = 0.25  # of them; if more are that slow there are two kinds
SHARED = frozenset({"cpu"})  # models whose speed other processes take part of: never named for it
BETWEEN = "p2p_"  # values of two devices: which two decides what connects them


class SlowDevice(NamedTuple):
    """One device that is slow in one test. WARN: not enough to drain the node."""

    node: str
    test: str
    device: str
    status: Literal["WARN", "FAIL"]
    evidence: str


class _Speed(NamedTuple):
    node: str
    device: str
    value: float


_Remark = tuple[_Speed, Literal["WARN", "FAIL"], str]


def slow(
    measured: Iterable[Measured],
    floors: Floors,
    baselines: fleet.Baselines,
    known: Mapping[str, int] = {},
) -> list[SlowDevice]:
    """The slow ones, in order of node, test and device. Pairs are judged elsewhere.

    ``known``: how many devices a node has where no test names any.
    """
    measured = list(measured)
    devices = fleet.devices_of(measured, known)
    groups: dict[tuple[str, str, str, str | int], list[_Speed]] = defaultdict(list)
    for one in measured:
        for name, value in one.values.items():
            if one.test != "pair" and name.endswith(SUFFIXES) and math.isfinite(value):
                # Of two devices only the same two compare, of a whole node only nodes with as many.
                among = one.device if name.startswith(BETWEEN) else ""
                alike = among if one.device else devices[one.node]
                groups[one.model, one.test, name, alike].append(_Speed(one.node, one.device, value))
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = defaultdict(list)
    for (model, test, name, _), speeds in sorted(groups.items(), key=repr):
        speeds.sort()
        for speed, status, text in _below(model, test, name, speeds, floors, baselines, devices):
            status = "WARN" if model in SHARED else status
            found[speed.node, test, speed.device].append((status, text))
    return [
        SlowDevice(
            *which,
            "FAIL" if any(status == "FAIL" for status, _ in remarks) else "WARN",
            "; ".join(dict.fromkeys(text for _, text in sorted(remarks))),
        )
        for which, remarks in sorted(found.items())
    ]


def _below(
    model: str,
    test: str,
    name: str,
    speeds: Sequence[_Speed],
    floors: Floors,
    baselines: fleet.Baselines,
    devices: Mapping[str, int],
) -> list[_Remark]:
    """Comparable speeds that are below the floor, the fleet's, or those of the run's others."""
    floor = floors(model, name)
    remarks: list[_Remark] = []
    if floor is not None:
        status: Literal["WARN", "FAIL"] = "FAIL" if floor.proof else "WARN"
        text = f"below {floor.limit:.4g} ({floor.source})"
        remarks += [(one, status, text) for one in speeds if one.value < floor.limit]
    for one in speeds:
        like = Measured(test, one.node, one.device, model)
        usual = baselines.usual(like, name, devices[one.node])
        least = fleet.limit(usual) if usual is not None else None
        if usual is not None and least is not None and one.value < least:
            text = f"below {least:.4g}, {fleet.FLEET_FAIL:g} of the median {usual.p50:.4g} of "
            remarks.append((one, "FAIL", f"{text}{usual.nodes} nodes of the fleet"))
    more = ""
    proven = {one for one, status, _ in remarks if status == "FAIL"}
    if proven == set(speeds) and _nodes(speeds) >= EVERYBODY:
        more = f'; so are all of its kind in this run: see [active.floors."{model}"] in robust.toml'
        remarks = [(one, "WARN", text) for one, _, text in remarks]
    remarks += _by_run(speeds)
    return [(one, how, f"{name} {one.value:.4g} is {text}{more}") for one, how, text in remarks]


def _by_run(speeds: Sequence[_Speed]) -> list[_Remark]:
    """Speeds far below those of the other devices of the run."""
    if len(speeds) < RUN_LEAST:
        return []
    middle = median(one.value for one in speeds)
    found = [one for one in speeds if one.value < RUN_FAIL * middle]
    few = len(found) <= max(1, int(RUN_FEW * len(speeds)))
    text = f"below {RUN_FAIL:g} of {middle:.4g}, the median of the {len(speeds)} in this run"
    text += "" if few else f"; so are {len(found)} of them: two kinds of machine?"
    return [(one, "FAIL" if few else "WARN", text) for one in found]


def _nodes(speeds: Iterable[_Speed]) -> int:
    return len({speed.node for speed in speeds})
