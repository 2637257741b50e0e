"""The findings of a check, and the ladder of actions that cure what they found. Pure.

Root imports it before every job, so it imports nothing but the words of a drain reason.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from robust_slurm.drain_reason import ActionName as ActionName
from robust_slurm.drain_reason import Class as Class

Status = Literal["PASS", "WARN", "FAIL", "ERROR"]
STATUSES: tuple[Status, ...] = ("PASS", "WARN", "ERROR", "FAIL")  # in the order of severity


class Action(NamedTuple):
    """One rung of the ladder, mildest first; ``proof`` is required before an undrain.

    ``proof``: "recheck" the same checks pass; "reset" they pass and the GPU was reset (or the
    driver loaded again, or the node booted) since the drain; "reboot" they pass and the node
    booted since; "person" a person said that it was repaired.
    """

    name: ActionName
    proof: Literal["recheck", "reset", "reboot", "person"]
    text: str


LADDER: tuple[Action, ...] = (
    Action("none", "recheck", "none: the node is undrained when its checks pass"),
    Action("clear-leftovers", "recheck", "remove what a job left: processes, memory, files"),
    Action(
        "restart-fabric-manager",
        "recheck",
        "restart nvidia-fabricmanager, then every process that uses a GPU",
    ),
    Action(
        "restart-imex",
        "recheck",
        "restart nvidia-imex on every node of the IMEX domain, then every process that uses it",
    ),
    Action("reset-gpu", "reset", "reset the GPU (nvidia-smi --gpu-reset -i N) or reboot"),
    Action("reboot", "reboot", "reboot the node (a power cycle where the device stays lost)"),
    Action("service", "person", "reseat or replace the part, then run `robust-health repaired`"),
)
ACTIONS: dict[str, Action] = {action.name: action for action in LADDER}
_RUNG: dict[str, int] = {action.name: place for place, action in enumerate(LADDER)}


class Finding(NamedTuple):
    """One thing that a check saw.

    ``check`` is the id of the condition ("ecc-uncorrected"), ``device`` what it is about ("gpu3",
    "mlx5_0", "/scratch", empty: the node), ``evidence`` one line with the measured value, the
    limit and the source, ``action`` the name of a rung of LADDER. ``uid``: the user whose doing
    it is, as far as that shows; -1: nobody's, or nobody knows whose.
    """

    status: Status
    cls: Class
    check: str
    device: str
    evidence: str
    action: ActionName
    uid: int = -1

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the class is called "class" there, and a uid that is not known is left out."""
        out: dict[str, Any] = self._asdict()
        if self.uid < 0:
            del out["uid"]
        out["class"] = out.pop("cls")
        return out


def worst(findings: list[Finding]) -> Status:
    """The most severe status; PASS for no findings."""
    return max((f.status for f in findings), key=STATUSES.index, default="PASS")


def rung(action: ActionName) -> int:
    """The place of an action on the ladder; the mildest one is 0."""
    return _RUNG[action]


def harder(one: ActionName, other: ActionName) -> ActionName:
    """The action that is further down the ladder."""
    return max(one, other, key=rung)
