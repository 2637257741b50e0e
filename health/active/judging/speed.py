"""Devices that are too slow: by a floor, the fleet's record, or the others of the run. Pure.

A floor names a node, except a published one of a value that depends on the host as well. The spread
of the others' speeds only raises a doubt, because it shifts with what was measured where (heat, a
power cap, two kinds of machine under one name), unless no such shift explains the distance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from health.active.judging import fleet
from health.active.judging.alignment import EVERYBODY
from health.active.judging.profiles import Floors
from health.active_tests import Measured

SUFFIXES = ("_tflops", "_gbps")  # of values that are speeds: more is better
# Of the fleet's median: far outside any spread of healthy devices (power, heat: 10-20 %), above
# what the usual faults leave (half the links, clocks locked low). And below p5, so that a kind of
# machine that is a twentieth of the fleet is a kind, not a fault.
FLEET_FAIL = 0.6
# Of the median of the run's other devices. Lower than the fleet's: only a few, measured once.
RUN_FAIL = 0.5
RUN_PEERS = 4  # others of the same model: the median holds while one of them is bad as well
SHARED = frozenset({"cpu"})  # models whose speed other processes take part of: never named for it
# Of the run's nodes (of the devices, where there are fewer than EVERYBODY nodes); if more are that
# slow there are two kinds of them.
RUN_FEW = 0.25
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


_Remark = tuple[Literal["WARN", "FAIL"], str]


def slow(
    measured: Iterable[Measured],
    floors: Floors,
    baselines: fleet.Baselines,
    known: Mapping[str, int] = {},
) -> list[SlowDevice]:
    """The slow ones, in order of node, test and device. Pairs and rings are judged elsewhere.

    ``known``: how many devices a node has where no test names any.
    """
    groups: dict[tuple[str, str, str], list[_Speed]] = defaultdict(list)
    measured = list(measured)
    devices = fleet.devices_of(measured, known)
    for one in measured:
        for name, value in one.values.items():
            if (
                one.test not in ("pair", "ring")
                and name.endswith(SUFFIXES)
                and math.isfinite(value)
            ):
                groups[one.model, one.test, name].append(_Speed(one.node, one.device, value))
    found: dict[tuple[str, str, str], list[_Remark]] = defaultdict(list)
    for (model, test, name), speeds in sorted(groups.items()):
        speeds.sort()
        remarks = _by_standard(model, test, name, speeds, floors, baselines, devices)
        for alike in _alike(name, speeds, devices):
            remarks += _by_run(name, alike)
        for speed, (status, text) in remarks:
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


def _alike(name: str, speeds: Sequence[_Speed], devices: Mapping[str, int]) -> list[list[_Speed]]:
    """Group speeds that are comparable: of two devices only the same two elsewhere, and of a whole
    node only nodes with as many devices."""
    groups: dict[str | int, list[_Speed]] = defaultdict(list)
    for speed in speeds:
        if name.startswith(BETWEEN):
            groups[speed.device].append(speed)
        else:
            groups["" if speed.device else devices[speed.node]].append(speed)
    return list(groups.values())


def _by_standard(
    model: str,
    test: str,
    name: str,
    speeds: Sequence[_Speed],
    floors: Floors,
    baselines: fleet.Baselines,
    devices: Mapping[str, int],
) -> list[tuple[_Speed, _Remark]]:
    """Speeds below the floor, or below what is usual in the fleet if no floor names the device."""
    floor = floors(model, name)
    found: list[tuple[_Speed, _Remark, fleet.FleetSpread | None]] = []
    held: dict[_Speed, fleet.FleetSpread | None] = {}  # to the fleet's limit; None: to a floor only
    for speed in speeds:
        said = f"{name} {speed.value:.4g} is below "
        one = Measured(test, speed.node, speed.device, model)
        spread = baselines.usual(one, name, devices[speed.node])
        usual = fleet.limit(spread) if spread else None
        if floor is not None or usual is not None:
            held[speed] = spread if usual is not None else None
        if floor is not None and speed.value < floor.limit:
            text = f"{said}{floor.limit:.4g} ({floor.source})"
            found.append((speed, ("FAIL" if floor.proof else "WARN", text), None))
            if floor.proof:
                continue
        if spread and usual is not None and speed.value < usual:
            far = speed.value < min(FLEET_FAIL * spread.p50, spread.p5)
            of = f"median {spread.p50:.4g} of {spread.nodes} nodes of the fleet"
            text = f"{said}{usual:.4g} ({of})"
            if before := baselines.other_counts(one, devices[speed.node]):
                far = False  # the nodes that have so many devices may be another kind of machine
                text += f"; tested with {devices[speed.node]} devices, usually with {before}"
            found.append((speed, ("FAIL" if far else "WARN", text), spread))
    # A power cap, a hot room, a limit that does not fit here: nothing is wrong with one node.
    # That some node is far worse than the rest is seen by the comparison within the run.
    low = {speed for speed, (status, _), spread in found if spread or status == "FAIL"}
    shared = _shared(held, {speed for speed, *_ in found}, low)
    more = (
        f'; so are all others of its kind in this run: see [active.floors."{model}"] in robust.toml'
    )
    return [
        (speed, ("WARN", remark[1] + more) if spread in shared else remark)
        for speed, remark, spread in found
    ]


def _shared(
    held: Mapping[_Speed, fleet.FleetSpread | None], below: set[_Speed], low: set[_Speed]
) -> set[fleet.FleetSpread | None]:
    """Return the limits that prove nothing, because every speed that is held to them is below.

    None is the floor, which all speeds are held to. ``below``: those below any limit; ``low``:
    below the fleet's, or a floor that is proof.
    """
    limits = set(held.values())
    if below == held.keys() and _nodes(held) >= EVERYBODY:
        return {*limits, None}
    alike = {limit: {one for one, of in held.items() if of == limit} for limit in limits - {None}}
    return {limit for limit, of in alike.items() if of <= low and _nodes(of) >= EVERYBODY}


def _nodes(speeds: Iterable[_Speed]) -> int:
    return len({speed.node for speed in speeds})


def _by_run(name: str, speeds: Sequence[_Speed]) -> list[tuple[_Speed, _Remark]]:
    """Speeds far below those of the other devices of the run."""
    if len(speeds) <= RUN_PEERS:
        return []
    middles = _medians_of_others([speed.value for speed in speeds])
    found = [
        (speed, middle)
        for speed, middle in zip(speeds, middles, strict=True)
        if speed.value < RUN_FAIL * middle
    ]
    nodes, behind = _nodes(speeds), _nodes(speed for speed, _ in found)
    of = f"{nodes} nodes: two kinds of machine?"
    if nodes < EVERYBODY:
        nodes, behind = len(speeds), len(found)
        of = f"{nodes} devices: two kinds of them?"
    few = behind <= max(1, int(RUN_FEW * nodes))
    others = len(speeds) - 1
    more = "" if few else f"; so are {behind} of {of}"
    return [
        (
            speed,
            (
                "FAIL" if few else "WARN",
                f"{name} {speed.value:.4g} is below {RUN_FAIL:g} of {middle:.4g}, the median of "
                f"the {others} others in this run{more}",
            ),
        )
        for speed, middle in found
    ]


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """For each value the median of all but itself."""
    ordered = sorted(values)
    rest = len(ordered) - 1
    middle = ((rest - 1) // 2, rest // 2)
    without: dict[float, float] = {}
    for at, value in enumerate(ordered):
        low, high = (ordered[index if index < at else index + 1] for index in middle)
        without[value] = (low + high) / 2
    return [without[value] for value in values]
