"""The verdict on a run's measurements: each node's findings, the nodes named and cleared. Pure.

A node is named only by proof: a wrong result, bits that differ from the others', a speed below a
floor, or its pairs. A test that could not run names no node, nor does a fault that all nodes show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from health.active.judging.alignment import EVERYBODY, Alignment, deviants
from health.active.judging.fleet import NO_BASELINES, Baselines
from health.active.judging.profiles import Floors, floor
from health.active.judging.speed import slow
from health.active_tests import Judged, Measured, fails
from health.finding import STATUSES, ActionName, Finding

if TYPE_CHECKING:
    from health.active.judging.pairing import PairVerdict

_EVIDENCE = 500  # characters of one finding's


class _Found:
    """Findings by node, each once."""

    def __init__(self) -> None:
        self._of: dict[str, set[Finding]] = defaultdict(set)

    def fail(self, node: str, check: str, device: str, text: str, action: ActionName) -> None:
        self._of[node].add(Finding("FAIL", "node", check, device, _line(text), action))

    def error(self, node: str, device: str, text: str) -> None:
        self._of[node].add(Finding("ERROR", "tool", "active-error", device, _line(text), "none"))

    def undecided(self, node: str, text: str) -> None:
        self.warn(node, "active-undecided", text)

    def warn(self, node: str, check: str, text: str) -> None:
        self._of[node].add(Finding("WARN", "tool", check, "", _line(text), "none"))

    def add(self, node: str, findings: Iterable[Finding]) -> None:
        self._of[node].update(findings)

    def result(self) -> dict[str, tuple[Finding, ...]]:
        """The worst first."""
        return {
            node: tuple(sorted(found, key=lambda f: (-STATUSES.index(f.status), *f[2:])))
            for node, found in sorted(self._of.items())
            if found
        }


def judge(
    measured: Sequence[Measured],
    *,
    pairs: PairVerdict | None = None,
    baselines: Baselines = NO_BASELINES,
    asked: Mapping[str, frozenset[str]] = {},
    seconds: float = 0.0,
    left_out: Sequence[str] = (),
    more: Mapping[str, Sequence[Finding]] = {},
    devices: Mapping[str, int] = {},
    floors: Floors = floor,
) -> Judged:
    """The outcome of a run; the order of ``measured`` is no matter.

    ``asked``: the tests that were to run, by node: one that gave nothing is an ERROR there, and
    only nodes in it can be cleared. ``more``: what else was found on the nodes. ``devices``:
    how many the workers had, by node. ``floors``: ``profiles.with_site`` for a site's.
    """
    ordered = tuple(sorted(measured, key=repr))
    found = _Found()
    _wrong(ordered, found)
    _errors(ordered, asked, pairs, found)
    aligned = deviants(ordered, baselines.digests)
    _bits(aligned, found)
    for one in slow(ordered, floors, baselines, devices):
        check = f"active-{one.test}-slow"
        if one.status == "FAIL":
            found.fail(one.node, check, one.device, one.evidence, _cure(one.device))
        else:
            warned = Finding("WARN", "node", check, one.device, _line(one.evidence), "none")
            found.add(one.node, [warned])
    if pairs is not None:
        _pairs(pairs, ordered, found)
    for node, findings in more.items():
        found.add(node, findings)
    rest = Judged({}, {}, frozenset(), {}, tuple(left_out), seconds, ordered, devices)
    return _judged(found, asked, rest)


def _judged(found: _Found, asked: Mapping[str, frozenset[str]], rest: Judged) -> Judged:
    findings = found.result()
    named = {
        node: tuple(f"{f.check}{f' {f.device}' if f.device else ''}: {f.evidence}" for f in bad)
        for node, of_node in findings.items()
        if (bad := fails(of_node))
    }
    errors = {
        node: tuple(f.evidence for f in of_node if f.status == "ERROR")
        for node, of_node in findings.items()
        if any(f.status == "ERROR" for f in of_node)
    }
    cleared = frozenset(
        node
        for node, tests in asked.items()
        if tests and not any(_open(f) for f in findings.get(node, ()))
    )
    return rest._replace(findings=findings, named=named, errors=errors, cleared=cleared)


def _open(finding: Finding) -> bool:
    """True if the finding leaves its node unproven; a device slower than usual does not."""
    return finding.status in ("FAIL", "ERROR") or finding.check == "active-undecided"


def _wrong(measured: Sequence[Measured], found: _Found) -> None:
    """Report wrong results. Those of pairs and bitwise are judged elsewhere."""
    by_test: dict[str, list[Measured]] = defaultdict(list)
    for one in measured:
        if one.test not in ("pair", "bitwise") and (one.wrong or not one.error):
            by_test[one.test].append(one)
    for test, results in by_test.items():
        ran, bad = {one.node for one in results}, {one.node for one in results if one.wrong}
        # Machines do not break together: what all of them compute wrongly the test gets wrong.
        if len(bad) >= EVERYBODY and bad == ran:
            for node in bad:
                why = f"{test}: wrong on all {len(bad)} nodes: the test is at fault, not the nodes"
                found.error(node, "", f"{why}: compare the versions of torch, driver and libraries")
            continue
        for one in results:
            if one.wrong:
                count = f" (and {len(one.wrong) - 1} more)" if len(one.wrong) > 1 else ""
                text = one.wrong[0] + count
                found.fail(one.node, f"active-{test}-wrong", one.device, text, "service")


def _errors(
    measured: Sequence[Measured],
    asked: Mapping[str, frozenset[str]],
    pairs: PairVerdict | None,
    found: _Found,
) -> None:
    ran: dict[str, set[str]] = defaultdict(set)
    for one in measured:
        ran[one.node].add(one.test)
        if one.error and one.test != "pair":  # the pairs' verdict says whose error it is
            found.error(one.node, one.device, f"{one.test} could not be run: {one.error}")
    for node, tests in asked.items():
        for test in sorted(tests - ran[node] - {"pair"}):
            found.error(node, "", f"{test} did not run: the worker sent no result")
        if "pair" in tests and not (pairs is not None and node in _known(pairs)):
            found.error(node, "", "pair did not run: no pair with this node finished")


def _known(pairs: PairVerdict) -> frozenset[str]:
    return pairs.cleared.union(pairs.named, pairs.undecided, pairs.errors)


def _bits(aligned: Alignment, found: _Found) -> None:
    for node, lines in aligned.named.items():
        for text in lines:
            found.fail(node, "active-bitwise-differs", "", text, "service")
    for node, text in aligned.undecided.items():
        found.undecided(node, text)


def _pairs(pairs: PairVerdict, measured: Sequence[Measured], found: _Found) -> None:
    wrong: set[str] = set()
    for one in measured:
        if one.test == "pair" and one.wrong:
            wrong.update((one.node, *one.peers))
    for node, lines in pairs.named.items():
        check = "active-pair-wrong" if node in wrong else "active-pair-slow"
        found.fail(node, check, "", "; ".join(lines), "service")
    for node, text in pairs.undecided.items():
        found.undecided(node, f"pair: {text}")
    for node, text in pairs.errors.items():
        found.error(node, "", f"pair could not be run: {text}")


def _cure(device: str) -> ActionName:
    """Return the mildest action that brings a slow device's clocks and links back."""
    return "reset-gpu" if device.startswith("gpu") else "reboot"


def _line(text: str) -> str:
    return " ".join(text.split())[:_EVIDENCE]
