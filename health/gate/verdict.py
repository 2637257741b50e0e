"""Open or closed, and the drain reason that says why. Pure."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, cast

from health.finding import ACTIONS, LADDER, ActionName, Class, Finding
from health.run.report import Report
from health.settings import Settings

PREFIX = "robust"
NO_DEVICE = "-"
_DEVICE_LIMIT = 64  # characters

# Slurm adds to a reason what becomes of `scontrol reboot` (set_node_reboot_reason), and scontrol
# shows behind it who set it and when: " [root@2025-11-21T10:00:00]".
_REBOOT = r"(?: : reboot (?:requested|issued|complete|timed out))"
_REASON = re.compile(
    rf"{PREFIX}:(?P<cls>node|user|tool):(?P<check>[a-z0-9-]+):(?P<device>[^:\s]+)"
    r":(?P<action>[a-z-]+):job(?P<job>[0-9]+)"
    rf"{_REBOOT}*(?: \[[^\[\]]*\])?"
)


class Reason(NamedTuple):
    """A drain reason of ours, taken apart; ``device`` as it stands there, "" for "-"."""

    cls: Class
    check: str
    device: str
    action: ActionName
    job: int  # 0: outside a job


class Verdict(NamedTuple):
    """``closing``: what closed the gate, the one that leads first; ``reason`` empty when open."""

    closed: bool
    closing: tuple[Finding, ...]
    reason: str

    @property
    def lead(self) -> Finding | None:
        return self.closing[0] if self.closing else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "closed": self.closed,
            "reason": self.reason,
            "closing": [finding.as_dict() for finding in self.closing],
        }


def judge(report: Report, settings: Settings) -> Verdict:
    """Closed by any FAIL, and by any ERROR but those of checks that tolerate their own.

    What the site switched off closes nothing, also where the report was made without that.

    The hardest action leads: what cures that cures the others. Then FAIL before ERROR (known
    before unknown), then the order of the report.
    """
    off = set(settings.gate["disabled"])
    open_errors = off.union(report.tolerated)
    closing = [
        finding
        for finding in report.findings
        if (finding.status == "FAIL" and finding.check not in off)
        or (finding.status == "ERROR" and finding.check not in open_errors)
    ]
    rung = {action.name: number for number, action in enumerate(LADDER)}
    closing.sort(key=lambda finding: (-rung[finding.action], finding.status == "ERROR"))
    reason = reason_for(closing[0], report.job) if closing else ""
    return Verdict(bool(closing), tuple(closing), reason)


def reason_for(finding: Finding, job: int) -> str:
    """``robust:<class>:<check>:<device>:<action>:job<id>``, without blanks."""
    device = re.sub(r"[^A-Za-z0-9_./+-]+", "_", finding.device)[:_DEVICE_LIMIT] or NO_DEVICE
    return f"{PREFIX}:{finding.cls}:{finding.check}:{device}:{finding.action}:job{job}"


def parse_reason(text: str) -> Reason | None:
    """A reason that ``reason_for`` made; None for any other text, also one with words added.

    Words that Slurm itself adds when the node is rebooted by it do not count.
    """
    match = _REASON.fullmatch(text.strip())
    if not match or match["action"] not in ACTIONS or len(match["job"]) > 18:
        return None
    device = match["device"]
    return Reason(
        cast(Class, match["cls"]),
        match["check"],
        "" if device == NO_DEVICE else device,
        cast(ActionName, match["action"]),
        int(match["job"]),
    )


def with_action(reason: Reason, action: ActionName) -> str:
    """The text of a reason, with another action."""
    device = reason.device or NO_DEVICE
    return f"{PREFIX}:{reason.cls}:{reason.check}:{device}:{action}:job{reason.job}"


def without_reboot(text: str) -> tuple[str, bool]:
    """A reason without what Slurm added for a reboot, and whether it had added anything."""
    plain = re.sub(rf"{_REBOOT}+$", "", text)
    return plain, plain != text
