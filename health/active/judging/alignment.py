"""Compare the bits that nodes computed from the same work, and name the nodes that differ. Pure.

A digest's key names all that may rightly change it, so equal keys mean equal bits on every healthy
device. Two machines that break by chance do not break alike: an equal digest of two nodes is
strong proof for both, and a whole group that differs from a reference is another software, not a
row of broken machines. So a node is named only if other results of the run show what is right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from health.active_tests import Measured

# From this many nodes on, a fault that all of them show is the test's, not theirs.
EVERYBODY = 3
_SHOWN = 4  # nodes that are named in evidence
_DIGITS = 12  # of a digest


class Alignment(NamedTuple):
    """``named`` differ, with the evidence; ``undecided`` nodes disagree and nobody can say who is
    right."""

    named: Mapping[str, tuple[str, ...]]
    undecided: Mapping[str, str]


class _Key(NamedTuple):
    """One key's digests: by node, then by device (a device that was asked twice may give two)."""

    key: str
    nodes: Mapping[str, Mapping[str, frozenset[str]]]

    def whole(self) -> dict[str, str]:
        """The nodes all of whose devices gave one digest, with it."""
        said = {node: frozenset().union(*devices.values()) for node, devices in self.nodes.items()}
        return {node: next(iter(digests)) for node, digests in said.items() if len(digests) == 1}


class _Tally:
    """The findings so far, key by key."""

    def __init__(self) -> None:
        self.named: dict[str, list[str]] = defaultdict(list)
        self.undecided: dict[str, list[str]] = defaultdict(list)

    def doubt(self, key: _Key, why: str) -> None:
        for node in key.nodes:
            self.undecided[node].append(f"{key.key}: {why}")

    def result(self) -> Alignment:
        undecided = {
            node: "; ".join(lines)
            for node, lines in sorted(self.undecided.items())
            if node not in self.named
        }
        named = {node: tuple(lines) for node, lines in sorted(self.named.items())}
        return Alignment(named, undecided)


def deviants(measured: Sequence[Measured], reference: Mapping[str, str] = {}) -> Alignment:
    """Nodes whose bits differ from the strict majority's, the reference's or their own devices'.

    ``reference``: digest by key, from the fleet's record. The order of ``measured`` is no matter.
    """
    tally = _Tally()
    _self_proven(measured, tally)
    for key in _keys(measured):
        whole = key.whole()
        split = len(key.nodes) - len(whole)
        if split > 1 and 2 * split >= len(key.nodes):
            tally.doubt(
                key,
                f"the devices of {split} of {len(key.nodes)} nodes differ from each other: the "
                f"test is not reproducible here, and the nodes are not at fault",
            )
            continue
        right, source = _right(key, whole, reference.get(key.key))
        if right:
            _compare(key, right, source, tally)
        elif source:
            tally.doubt(key, source)
        else:
            _among_themselves(key, whole, tally)
    return tally.result()


def _keys(measured: Sequence[Measured]) -> list[_Key]:
    found: dict[str, dict[str, dict[str, set[str]]]] = defaultdict(dict)
    for one in measured:
        if one.wrong or one.error:  # proven by itself, or not at its end: says nothing of others
            continue
        for key, digest in one.digests.items():
            devices = found[key].setdefault(one.node, {})
            devices.setdefault(one.device, set()).add(digest)
    return [
        _Key(
            key,
            {
                node: {device: frozenset(said) for device, said in sorted(devices.items())}
                for node, devices in sorted(nodes.items())
            },
        )
        for key, nodes in sorted(found.items())
    ]


def _self_proven(measured: Sequence[Measured], tally: _Tally) -> None:
    """Nodes that the bitwise test caught alone: the same device gave two results."""
    ran = {one.node for one in measured if one.test == "bitwise" and not one.error}
    found: dict[str, set[str]] = defaultdict(set)
    for one in measured:
        if one.test == "bitwise" and one.wrong:
            ran.add(one.node)
            found[one.node].update(f"{one.device}: {text}".lstrip(": ") for text in one.wrong)
    if len(found) >= EVERYBODY and set(found) == ran:
        why = (
            f"all {len(ran)} nodes gave different bits in the second run: the test is not "
            "reproducible here, and the nodes are not at fault"
        )
        for node in found:
            tally.undecided[node].append(why)
        return
    for node, lines in found.items():
        tally.named[node] += sorted(lines)


def _right(key: _Key, whole: Mapping[str, str], known: str | None) -> tuple[str, str]:
    """The right digest and who says so; ("", why) for a conflict, ("", "") if nobody can say."""
    total = len(key.nodes)
    counts = sorted(Counter(whole.values()).items(), key=lambda pair: (-pair[1], pair[0]))
    best, votes = counts[0] if counts else ("", 0)
    if votes >= 2 and 2 * votes > total:
        # All of three nodes and more against the record: the record is of other software.
        if known in (None, best) or votes == total >= EVERYBODY:
            names = [node for node, digest in whole.items() if digest == best]
            return best, f"{votes} of {total} nodes ({_some(names)})"
        return "", (
            f"{votes} of {total} nodes gave {best[:_DIGITS]}, which is not the fleet's "
            f"{(known or '')[:_DIGITS]}"
        )
    if known is None:
        return "", ""
    said = [
        digest for devices in key.nodes.values() for each in devices.values() for digest in each
    ]
    if known in said:
        return known, "the fleet's reference"
    if len(said) == 1:
        return "", (
            f"{said[0][:_DIGITS]} is not the fleet's {known[:_DIGITS]}, and no other device here "
            f"can confirm either: test it together with two others"
        )
    return "", f"no node gave the fleet's {known[:_DIGITS]}: was it recorded with other software?"


def _compare(key: _Key, right: str, source: str, tally: _Tally) -> None:
    for node, devices in key.nodes.items():
        other = {device: said - {right} for device, said in devices.items() if said - {right}}
        if not other:
            continue
        if len(other) == len(devices):
            shown = sorted(frozenset().union(*other.values()))
            tally.named[node].append(
                f"{key.key}: {_short(shown)} against {_short([right])} of {source}"
            )
        else:
            tally.named[node].append(
                f"{key.key}: {_some(sorted(other))} of {len(devices)} devices gave "
                f"{_short(sorted(frozenset().union(*other.values())))} against {_short([right])} "
                f"of {source}"
            )


def _among_themselves(key: _Key, whole: Mapping[str, str], tally: _Tally) -> None:
    """Judge without a right digest: nodes whose own devices differ, and nodes that disagree."""
    for node, devices in key.nodes.items():
        if node not in whole:
            _own_devices(key.key, node, devices, tally)
    if len(set(whole.values())) > 1:
        shown = ", ".join(
            f"{node} {digest[:_DIGITS]}" for node, digest in list(whole.items())[:_SHOWN]
        )
        why = f"{len(whole)} nodes, no majority ({shown}): the right result is unknown"
        for node in whole:
            tally.undecided[node].append(f"{key.key}: {why}")


def _own_devices(key: str, node: str, devices: Mapping[str, frozenset[str]], tally: _Tally) -> None:
    counts = Counter(digest for said in devices.values() for digest in said)
    best, votes = min(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    twice = sorted(device for device, said in devices.items() if len(said) > 1)
    if twice:
        tally.named[node].append(f"{key}: {_some(twice)} gave {_short(sorted(counts))}")
    elif 2 * votes > len(devices):
        odd = sorted(device for device, said in devices.items() if best not in said)
        tally.named[node].append(
            f"{key}: {_some(odd)} gave other bits than its {votes} other devices ({_short([best])})"
        )
    elif len(devices) == 2:
        tally.named[node].append(f"{key}: its devices {_some(sorted(devices))} differ")
    else:
        tally.undecided[node].append(
            f"{key}: its {len(devices)} devices gave {_short(sorted(counts))}"
        )


def _some(names: Sequence[str]) -> str:
    """Names, the first few of them."""
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ",".join([*(name or "it" for name in names[:_SHOWN]), *more])


def _short(digests: Sequence[str]) -> str:
    return "/".join(digest[:_DIGITS] for digest in digests[:_SHOWN])
