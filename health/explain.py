"""Explanations of families, findings and Xids: pages and catalogue. Reads only the package."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from health.check import Check, Condition
from health.finding import ACTIONS

PAGES = Path(__file__).with_name("pages")

# Findings of the runner itself, which have no page of their own.
_RUNNER = {
    "config-unusable": "robust.toml cannot be used, and the last usable version stays in force "
    "(robust.toml.last; without it the defaults); or its last line is not the end mark, so that it "
    "may be written in part; or a key cannot be used, and its default "
    "applies. This WARN neither opens nor closes the gate. `robust-admin doctor` shows the fix.",
    "gate-crashed": "the gate itself failed (ERROR of class tool) and stays closed. The evidence "
    "is the Python exception; `robust-health check` on the node shows whether it happens again.",
    "gate-deadline": "the time for all checks ended before some had run (ERROR of class tool). "
    "The gate stays closed because their results are unknown. Find the slow check (times in "
    "`robust-health check --json`) before you raise the deadline in [gate].",
}
_SUFFIXES = {
    "hung": "The check did not finish within its deadline (FAIL of class node): a device or file "
    "system that it reads does not answer. The evidence shows where in the kernel the check "
    "waits. If its process cannot be killed, it is abandoned, and the check does not run again "
    "until that process has exited.",
    "error": "The check itself failed (ERROR of class tool) and has no result. This closes the "
    "gate unless `robust-health list` says that its ERROR does not.",
    "many": "There were more findings than a report holds; the worst are in it.",
}


class UnknownTopic(LookupError):
    """No topic has that name; the text names close ones."""


def explain(topic: str, checks: Sequence[Check]) -> str:
    """The text on a family's name, a finding's id, "79", "xid79", "Xid 79" or "sxid12028"."""
    word = topic.strip().lower().replace("_", "-")
    number = re.fullmatch(r"(s?xid)?[- ]?0*(\d{1,6})", word)
    if number:
        return _code(int(number[2]), number[1] == "sxid")
    for check in checks:
        name = check.name.replace("_", "-")
        if word == name:
            return _page(check)
        for condition in check.conditions:
            if word == condition.check:
                return f"{_row(check, condition)}\n\n{_page(check)}"
        for suffix, text in _SUFFIXES.items():
            if word == f"{name}-{suffix}":
                return f"{word}: {text}\n\n{_page(check)}"
    if word in _RUNNER:
        return f"{word}: {_RUNNER[word]}"
    known = [check.name for check in checks]
    known += [condition.check for check in checks for condition in check.conditions]
    close = difflib.get_close_matches(word, known, 3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`robust-health list` shows all"
    raise UnknownTopic(f"{topic}: neither a check nor a finding nor an Xid; {hint}")


def _row(check: Check, condition: Condition) -> str:
    return (
        f"{condition.check} (family {check.name}): {condition.status}, class {condition.cls}\n"
        f"when:   {condition.when}\n"
        f"action: {condition.action}: {ACTIONS[condition.action].text}"
    )


def _page(check: Check) -> str:
    path = PAGES / f"{check.name}.md"
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as err:
        return f"{check.name}: its page {path} cannot be read: {err.strerror}"


def _code(number: int, switch: bool) -> str:
    from health.nvidia.xid_catalog import SXIDS, XIDS

    if not switch and number in XIDS:
        name, meaning, bucket, follow_up, branch, action, cls = XIDS[number]
        lines = [
            f"Xid {number} ({name}): {meaning}",
            f"NVIDIA's bucket: {bucket}; follow-up: {follow_up}",
            f"class: {cls}",
            f"action here: {_action(action)}",
        ]
        if branch:
            lines.append(
                f"from driver branch {branch} on, the accompanying Xid 154 names the "
                f"required action"
            )
        lines.append(f'a site sets its own: [xid] "{number}" = "{action}"')
        return "\n".join([*lines, "", "see also: robust-health explain xid"])
    if number in SXIDS and (switch or number not in XIDS):
        kind, action, meaning = SXIDS[number]
        return "\n".join(
            [
                f"SXid {number} (NVSwitch): {meaning}",
                f"kind: {kind}",
                f"action here: {_action(action)}",
                "",
                "see also: robust-health explain xid",
            ]
        )
    what = "SXid" if switch else "Xid"
    raise UnknownTopic(f"{what} {number}: not in the catalogue")


def _action(name: str) -> str:
    if name in ("none", "watch") or name not in ACTIONS:
        return f"{name}: it is reported and drains nothing"
    return f"{name}: {ACTIONS[name].text}"
