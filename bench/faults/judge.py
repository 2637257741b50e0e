"""The judgement of one run of bench.faults (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.chaos.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """One run, as the table shows it."""

    detected: float | None
    """Seconds from the fault to the first incident; None: there was none."""
    causes: tuple[str, ...]
    """The causes of the incidents, in their order, each once."""
    named: frozenset[str]
    """The suspects of all incidents."""
    evictions: int
    """Healthy nodes that were reported, excluded, drained or replaced."""
    lost_steps: int | None
    """Steps that were done again; None: an incident does not know."""
    cause_right: bool
    machine_right: bool | None
    """All bad nodes are among the suspects; None: there is no bad node."""
    right: bool


def find(
    bad: Collection[str],
    causes: Collection[str],
    verdict: Verdict,
    incidents: Sequence[Mapping[str, Any]],
    began: float,
    *,
    no_others: bool = False,
) -> Finding:
    """Judge a run. `causes`: the right ones; none: an incident may say anything but "node", other
    than of a node that was lost twice.

    `no_others`: no healthy node may be a suspect either, though nothing is done about it.
    """
    said = tuple(dict.fromkeys(str(record["cause"]) for record in incidents))
    named = frozenset(str(node) for record in incidents for node in record["suspects"])
    lost = [record["lost_steps"] for record in incidents]
    machine = named >= frozenset(bad) if bad else None
    clean = not no_others or named <= frozenset(bad)
    wrong = any(_blames(record, verdict.by_rule) for record in incidents)
    cause = bool(set(said) & set(causes)) if causes else not wrong
    return Finding(
        detected=incidents[0]["time"] - began if incidents else None,
        causes=said,
        named=named,
        evictions=len(verdict.blamed),
        lost_steps=None if None in lost else sum(lost),
        cause_right=cause,
        machine_right=machine,
        right=verdict.right and cause and machine is not False and clean,
    )


def _blames(record: Mapping[str, Any], by_rule: Collection[str]) -> bool:
    """True if the cause is said to be a node that is healthy, and was not lost twice."""
    suspects = record["suspects"]
    return record["cause"] == "node" and not (suspects and set(suspects) <= set(by_rule))
