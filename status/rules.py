"""False alarms by rule: how often each rule of diagnosis reported a node, and was wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from status.story import Suspicion, Verdict


@dataclass(frozen=True)
class RuleRow:
    """A rule of diagnosis; ``rule`` is "" for records of versions that did not note it.

    Reports of one job against one node by one rule count once. Each has one of the verdicts.
    """

    rule: str
    reported: int
    evicted: int  # nodes that left a job by this rule, reported or not
    confirmed: int
    cleared: int
    withdrawn: int
    refused: int
    open: int
    false_alarms: int  # cleared or withdrawn
    false_share: float | None  # of the reports with a verdict; None: there are none


_WORST_LAST: tuple[Verdict, ...] = ("open", "refused", "withdrawn", "cleared", "confirmed")


def rule_rows(found: Iterable[Suspicion]) -> list[RuleRow]:
    """One row for each rule, most false alarms first. What the gate found itself is left out."""
    verdicts: dict[str, dict[tuple[str, int], Verdict]] = {}
    evicted: dict[str, set[tuple[str, int]]] = {}
    for one in found:
        if one.source != "job" or one.verdict == "warned":
            continue
        key = one.node, one.of_job
        mine = verdicts.setdefault(one.rule, {})
        if one.evicted:
            evicted.setdefault(one.rule, set()).add(key)
        if one.reported:
            mine[key] = max(mine.get(key, one.verdict), one.verdict, key=_WORST_LAST.index)
    rows = [
        _row(rule, list(each.values()), len(evicted.get(rule, ())))
        for rule, each in verdicts.items()
    ]
    return sorted(rows, key=lambda row: (-row.false_alarms, -row.reported, row.rule))


def _row(rule: str, verdicts: list[Verdict], evicted: int) -> RuleRow:
    wrong = verdicts.count("cleared") + verdicts.count("withdrawn")
    decided = wrong + verdicts.count("confirmed")
    return RuleRow(
        rule=rule,
        reported=len(verdicts),
        evicted=evicted,
        confirmed=verdicts.count("confirmed"),
        cleared=verdicts.count("cleared"),
        withdrawn=verdicts.count("withdrawn"),
        refused=verdicts.count("refused"),
        open=verdicts.count("open"),
        false_alarms=wrong,
        false_share=round(wrong / decided, 4) if decided else None,
    )
