"""The active tests, and the form of their measurements. Pure; standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from health.finding import ACTIONS, STATUSES, Finding

Level = Literal["quick", "standard", "long"]
LEVELS: tuple[Level, ...] = ("quick", "standard", "long")
Need = Literal["torch", "cuda", "exclusive", "peer"]
Scope = Literal["device", "node", "pair"]


class Test(NamedTuple):
    """One row of the table of tests.

    ``seconds``: what it takes at most on a healthy node, by level (time on the device, without
    the start of the process). ``scope``: a "device" test runs on every device of a node, a "node"
    test once on all devices together, a "pair" test on two nodes.
    """

    name: str
    summary: str
    seconds: Mapping[Level, float]
    scope: Scope
    needs: frozenset[Need]


TESTS: tuple[Test, ...] = (
    Test(
        "bitwise",
        "a small reference model, the same bits on every machine",
        {"quick": 2.0, "standard": 10.0, "long": 60.0},
        "device",
        frozenset({"torch"}),
    ),
    Test(
        "gemm",
        "sustained matrix products: speed, and the same bits every time",
        {"quick": 3.0, "standard": 30.0, "long": 600.0},
        "device",
        frozenset({"torch", "exclusive"}),
    ),
    Test(
        "memory",
        "patterns over the free memory of the device, and its bandwidth",
        {"quick": 3.0, "standard": 30.0, "long": 600.0},
        "device",
        frozenset({"torch", "exclusive"}),
    ),
    Test(
        "links",
        "copies host to device, device to host, and between devices",
        {"quick": 2.0, "standard": 10.0, "long": 60.0},
        "node",
        frozenset({"torch", "cuda", "exclusive"}),
    ),
    Test(
        "local",
        "all-reduce and all-to-all between a node's own devices, result checked",
        {"quick": 3.0, "standard": 15.0, "long": 120.0},
        "node",
        frozenset({"torch", "exclusive"}),
    ),
    Test(
        "pair",
        "all-reduce between two nodes, result checked; finds slow nodes by pairing them again",
        {"quick": 2.0, "standard": 8.0, "long": 60.0},
        "pair",
        frozenset({"torch", "exclusive", "peer"}),
    ),
)
BY_NAME: Mapping[str, Test] = {test.name: test for test in TESTS}


class Measured(NamedTuple):
    """The measurements of one test on one device of one node (of two nodes: ``peers``).

    ``device`` is "cpu", or "gpu0" as the passive checks name it; "" for a test of a whole node.
    ``model`` names the device's kind ("NVIDIA H100 80GB HBM3", "cpu"), by which profiles and the
    fleet's record are looked up. ``values`` are numbers with their unit in the name
    ("bf16_tflops", "d2h_gbps": 1e9 bytes/s). ``digests`` are hexadecimal. ``wrong`` proves that
    the device computed or carried something wrongly, a line each; no other field proves that.
    ``error`` says why the test could not be run to its end: that proves nothing about the node.
    """

    test: str
    node: str
    device: str = ""
    model: str = ""
    values: Mapping[str, float] = {}
    digests: Mapping[str, str] = {}
    wrong: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0
    peers: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON, without what is empty."""
        return {key: value for key, value in self._asdict().items() if value}


def measured(data: Any) -> Measured:
    """Read a measurement from another process's JSON. ValueError for anything else."""
    if not isinstance(data, dict) or set(data) - set(Measured._fields):
        raise ValueError(f"not a measurement: {str(data)[:100]}")
    values, digests = data.get("values", {}), data.get("digests", {})
    if not isinstance(values, dict) or not isinstance(digests, dict):
        raise ValueError(f"not a measurement: {str(data)[:100]}")
    return Measured(
        str(data.get("test", "")),
        str(data.get("node", "")),
        str(data.get("device", "")),
        str(data.get("model", "")),
        {str(k): float(v) for k, v in values.items()},
        {str(k): str(v)[:128] for k, v in digests.items()},
        tuple(str(line)[:300] for line in data.get("wrong", ())),
        str(data.get("error", ""))[:600],
        float(data.get("seconds", 0.0)),
        tuple(str(name) for name in data.get("peers", ())),
    )


def finding(data: Any) -> Finding:
    """Read a finding from another process's JSON. Raises ValueError, TypeError, KeyError."""
    status, cls, action = data["status"], data["class"], data["action"]
    if status not in STATUSES or cls not in ("node", "user", "tool") or action not in ACTIONS:
        raise ValueError(f"not a finding: {str(data)[:100]}")
    check, device = str(data["check"])[:60], str(data["device"])[:60]
    return Finding(status, cls, check, device, str(data["evidence"])[:600], action)


class Judged(NamedTuple):
    """The outcome of a run of active tests.

    ``findings`` by node, as the passive checks make them (FAIL: the node; ERROR: could not be
    tested). ``named``: nodes with a FAIL of class node, with the evidence. ``cleared``: nodes on
    which every test that was to run did and passed. ``left_out``: what was not run and why.
    ``devices``: how many the workers had, by node.
    """

    findings: Mapping[str, tuple[Finding, ...]]
    named: Mapping[str, tuple[str, ...]]
    cleared: frozenset[str]
    errors: Mapping[str, tuple[str, ...]]
    left_out: tuple[str, ...]
    seconds: float
    measured: tuple[Measured, ...] = ()
    devices: Mapping[str, int] = {}


def fails(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that prove the node bad."""
    return tuple(f for f in findings if f.status == "FAIL" and f.cls == "node")
