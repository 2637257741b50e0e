"""Baselines by model: the values usual in the fleet, from the results in the nodes' ledger.

Results are events of kind "active" in the nodes' histories (``history.py``), one for each test and
device: {"node", "level", "test", "device", "model", "values", "digests", "ok", and where there is
any "devices" (how many of the node were tested), "peers", "wrong", "error"}. Nothing here decides
alone that a node is bad.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from health.active_tests import BY_NAME, Level, Measured
from health.history import events as history
from health.node import rootfiles
from health.node.system import Event

KIND = "active"
# An event must stay far below the ledger's 64 KiB a line, which would lose its data.
_MOST_VALUES = 32
_MOST_DIGESTS = 32
_NAME = 200  # characters of a name; a longer one would be another name if it were cut
_TEXT = 300
_MOST_LINES = 4
_MOST_PEERS = 8

# With 8 nodes the median and the deviation hold while 3 of them are bad.
MIN_NODES = 8
# A device counts once, by the median of its newest results: a node that is tested every night
# weighs no more than one tested at burn-in, and one bad run says little.
NEWEST = 5
FLEET_FAIL = 0.6
"""Of the fleet's median: far outside any spread of healthy devices (power, heat: 10 to 20 %), above
what the usual faults leave (half the links, clocks locked low)."""
# A digest is the fleet's when this many nodes gave it, and this share of all who gave one: were it
# all of them, one bad machine would take the standard away from the others.
AGREE, AGREED = 3, 0.9

_DRAINS = "drains.jsonl"  # the circuit breaker's, among the nodes' histories
_MOST_NODES = 4096  # spread over all names: enough for percentiles
_TOTAL = 64 << 20  # bytes of all files together, each file's newest end
_LEAST, _TAIL = 16 << 10, 128 << 10


class FleetSpread(NamedTuple):
    """The median of a value over the devices of so many nodes."""

    p50: float
    nodes: int


class Baselines(NamedTuple):
    """Values by (model, test, value); and the digests that the fleet agrees on, by key.

    The values that depend on all devices of a node have its kind ("8 x NVIDIA H200") for the model.
    """

    spreads: Mapping[tuple[str, str, str], FleetSpread]
    digests: Mapping[str, str]

    def usual(self, one: Measured, name: str, devices: int) -> FleetSpread | None:
        """Return what is usual for a value of nodes with so many devices.

        ``devices`` 0: their number is not known; the fleet must have one kind of node then.
        """
        if not _of_whole(one.test, one.device):
            return self.spreads.get((one.model, one.test, name))
        if devices:
            return self.spreads.get((kind(one.model, devices), one.test, name))
        found = [
            spread
            for (of, test, value), spread in self.spreads.items()
            if (test, value) == (one.test, name) and of.endswith(f" x {one.model}")
        ]
        return found[0] if len(found) == 1 else None


NO_BASELINES = Baselines({}, {})


def kind(model: str, devices: int) -> str:
    """Name a kind of node: only nodes with as many devices share what is usual."""
    return f"{devices} x {model}"


def _of_whole(test: str, device: str) -> bool:
    """Return whether the other devices of the node decide the values, too."""
    return not device or (test in BY_NAME and BY_NAME[test].scope != "device")


def devices_of(measured: Iterable[Measured], known: Mapping[str, int] = {}) -> dict[str, int]:
    """Count the devices that were tested on each node; where no test named any, as ``known``."""
    names: dict[str, set[str]] = defaultdict(set)
    for one in measured:
        names[one.node].update(filter(None, [one.device]))
    return {node: len(found) or known.get(node, 0) for node, found in names.items()}


def limit(spread: FleetSpread) -> float | None:
    """The value below which a device is slow; None: too few nodes to say."""
    return FLEET_FAIL * spread.p50 if spread.nodes >= MIN_NODES and spread.p50 > 0 else None


def event_data(
    measured: Measured, level: Level, *, named: bool = False, devices: int = 0
) -> dict[str, Any]:
    """The data of the event that records one result.

    ``named``: the node was found bad in this run, so none of its results sets a standard.
    ``devices``: how many of the node were tested; 0: not known.
    """
    values = {k: v for k, v in sorted(measured.values.items()) if _fits(k) and math.isfinite(v)}
    digests = {k: v for k, v in sorted(measured.digests.items()) if _fits(k) and _fits(v)}
    data: dict[str, Any] = {
        "node": measured.node[:_NAME],
        "level": level,
        "test": measured.test[:_NAME],
        "device": measured.device[:_NAME],
        "model": measured.model[:_NAME],
        "values": dict(islice(values.items(), _MOST_VALUES)),
        "digests": dict(islice(digests.items(), _MOST_DIGESTS)),
        "ok": not (measured.wrong or measured.error or named),
    }
    if devices:
        data["devices"] = devices
    if measured.peers:
        data["peers"] = [peer[:_NAME] for peer in measured.peers[:_MOST_PEERS]]
    if measured.wrong:
        data["wrong"] = [text[:_TEXT] for text in measured.wrong[:_MOST_LINES]]
    if measured.error:
        data["error"] = measured.error[:_TEXT]
    return data


def _fits(name: str) -> bool:
    """True if the name is short, and takes no more room as JSON than it has characters."""
    return len(name) <= _NAME and name.isascii() and name.isprintable()


def baselines(events: Iterable[Event]) -> Baselines:
    """Return the baselines from the events of all nodes; only results that passed count."""
    speeds: dict[tuple[str, str, str], dict[tuple[str, str], list[float]]] = defaultdict(dict)
    digests: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    passed = [event for event in events if event.kind == KIND and event.data.get("ok") is True]
    seen: dict[str, set[str]] = defaultdict(set)
    for event in passed:
        name = str(event.data.get("device", ""))
        seen[str(event.data.get("node", ""))].update(filter(None, [name]))
    for event in sorted(passed, key=lambda event: event.time, reverse=True):
        data = event.data
        device = (str(data.get("node", "")), str(data.get("device", "")))
        model, test = str(data.get("model", "")), str(data.get("test", ""))
        # A result of an earlier release does not say how many devices the node had.
        names = seen[device[0]]
        devices = _count(data.get("devices")) or len(names - {"cpu"}) or len(names)
        if _of_whole(test, device[1]):
            if not devices:
                continue
            model = kind(model, devices)
        for name, value in _numbers(data.get("values")):
            newest = speeds[model, test, name].setdefault(device, [])
            if len(newest) < NEWEST:
                newest.append(value)
        for key, digest in _texts(data.get("digests")):
            digests[key].setdefault(device, digest)
    return Baselines(
        {key: _spread(devices) for key, devices in sorted(speeds.items())},
        _agreed(digests),
    )


def _count(found: Any) -> int:
    return found if type(found) is int and 0 < found < 1 << 16 else 0


def _numbers(found: Any) -> Iterable[tuple[str, float]]:
    for name, value in found.items() if isinstance(found, dict) else ():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and math.isfinite(value):
            yield str(name), float(value)


def _texts(found: Any) -> Iterable[tuple[str, str]]:
    for key, digest in found.items() if isinstance(found, dict) else ():
        if isinstance(digest, str) and digest:
            yield str(key), digest


def _spread(devices: Mapping[tuple[str, str], Sequence[float]]) -> FleetSpread:
    middle = median(median(newest) for newest in devices.values())
    return FleetSpread(middle, len({node for node, _ in devices}))


def _agreed(digests: Mapping[str, Mapping[tuple[str, str], str]]) -> dict[str, str]:
    out: dict[str, str] = {}
    for key, devices in sorted(digests.items()):
        of_node: dict[str, set[str]] = defaultdict(set)
        for (node, _), digest in devices.items():
            of_node[node].add(digest)
        votes = Counter(next(iter(said)) for said in of_node.values() if len(said) == 1)
        for digest, nodes in votes.items():
            if nodes >= max(AGREE, AGREED * len(of_node)):
                out[key] = digest
    return out


def recorded(state_dir: str) -> list[Event]:
    """The recorded results of the fleet; [] before there are any.

    Raises OSError for a directory of nodes that cannot be read or trusted; one node's file that
    cannot be is left out. Blocks while the shared file system does: call it in a child.
    """
    try:
        nodes = rootfiles.open_dir(f"{state_dir}/{history.NODES}")
    except FileNotFoundError:
        return []
    with rootfiles.closing(nodes):
        names = sorted(
            name
            for name in os.listdir(nodes)  # noqa: PTH208
            if name.endswith(".jsonl") and name != _DRAINS
        )
        names = names[:: max(1, math.ceil(len(names) / _MOST_NODES))]
        most = max(_LEAST, min(_TAIL, _TOTAL // max(1, len(names))))
        found: list[Event] = []
        for name in names:
            found += _results(nodes, name, most)
        return found


def _results(nodes: int, name: str, most: int) -> list[Event]:
    try:
        fd = rootfiles.open_file(nodes, name, os.O_RDONLY)
    except OSError:  # a link, a pipe, another's file: no record of root's
        return []
    with rootfiles.closing(fd):
        raw = rootfiles.tail(fd, most)
    mark = b'"kind":"%s"' % KIND.encode()  # as rootfiles.line_of writes it; most lines are others
    lines = b"\n".join(line for line in raw.split(b"\n") if mark in line)
    node = name.removesuffix(".jsonl")
    return [event for event in history.parse(lines) if event.data.get("node") == node]
