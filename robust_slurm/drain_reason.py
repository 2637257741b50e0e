"""The drain reasons that robust-slurm sets: one grammar to write and to recognise them. Pure.

``robust:<class>:<check>:<device>:<action>:job<id>``, without blanks. The device is "-" for a
finding about the whole node, and the job is 0 outside of a job. Imported before every job, by root.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, cast, get_args

PREFIX = "robust:"
# Whose fault: the machine's, a user's (files, processes), or that of the check's own tools.
Class = Literal["node", "user", "tool"]
ActionName = Literal[
    "none",
    "clear-leftovers",
    "reset-gpu",
    "restart-fabric-manager",
    "restart-imex",
    "reboot",
    "service",
]

_NO_DEVICE = "-"
_DEVICE_LIMIT = 64  # characters
# Slurm adds to a reason what becomes of `scontrol reboot` (set_node_reboot_reason), and scontrol
# shows behind it who set it and when: " [root@2025-11-21T10:00:00]".
_REBOOT = r"(?: : reboot (?:requested|issued|complete|timed out))"
_REASON = (  # compiled when it is first needed: no healthy prolog does
    rf"{PREFIX}(?P<cls>{'|'.join(get_args(Class))}):(?P<check>[a-z0-9-]+):(?P<device>[^:\s]+)"
    rf":(?P<action>{'|'.join(get_args(ActionName))}):job(?P<job>[0-9]{{1,18}})"
    rf"{_REBOOT}*(?: \[[^\[\]]*\])?"
)


class Reason(NamedTuple):
    """The parts of a drain reason of ours; ``device`` is "" for the whole node."""

    cls: Class
    check: str
    device: str
    action: ActionName
    job: int  # 0: outside a job

    @property
    def text(self) -> str:
        """The reason as Slurm shows it; special characters in the device become "_"."""
        device = re.sub(r"[^A-Za-z0-9_./+-]+", "_", self.device)[:_DEVICE_LIMIT] or _NO_DEVICE
        return f"{PREFIX}{self.cls}:{self.check}:{device}:{self.action}:job{self.job}"


def parse_reason(text: str) -> Reason | None:
    """Return the parts of a reason of ours; None for any other text, also one with words added.

    Words that Slurm itself adds when it reboots the node are ignored.
    """
    match = re.fullmatch(_REASON, text.strip())
    if not match:
        return None
    return Reason(
        cast(Class, match["cls"]),
        match["check"],
        "" if match["device"] == _NO_DEVICE else match["device"],
        cast(ActionName, match["action"]),
        int(match["job"]),
    )


def without_reboot(text: str) -> tuple[str, bool]:
    """Return a reason without what Slurm added for a reboot, and True if it had added anything."""
    plain = re.sub(rf"{_REBOOT}+$", "", text)
    return plain, plain != text
