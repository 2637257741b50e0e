"""Orders about partitions and reservations: of root, SlurmUser and Slurm's administrators only.

Slurm refuses the name of a node that it does not know, but 22.05 leaves the partition with no
usable node all the same: look names up first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from robust_slurm.slurm.ask import Questions
from robust_slurm.slurm.errors import SlurmError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9_.,:\[\]-]*", re.ASCII)


class Objects(Questions):
    """Adds to the questions the orders that make, change and remove partitions and reservations.

    Partitions live in slurmctld's memory: a reconfigure or restart brings back slurm.conf's.
    Reservations outlive both.
    """

    def create_partition(self, name: str, settings: Mapping[str, str]) -> None:
        """Create a partition; ``settings`` as slurm.conf names them. Never retried.

        SlurmError ``denied`` without the right to do so.
        """
        self._run(("scontrol", "create", *_words(name, settings)))

    def update_partition(self, name: str, settings: Mapping[str, str]) -> None:
        """Change settings of a partition; Nodes="" removes all its nodes. Jobs on them go on."""
        self._run(("scontrol", "update", *_words(name, settings)), retry=True)

    def create_reservation(self, name: str, settings: Mapping[str, str]) -> None:
        """Create a reservation; ``settings``: StartTime, Duration, Nodes, Users, Flags (scontrol).

        Never retried. SlurmError ``conflict`` if jobs run on the nodes and Flags do not say
        IGNORE_JOBS.
        """
        words = _words(name, settings, "ReservationName")
        self._run(("scontrol", "create", *words))

    def delete_reservation(self, name: str) -> None:
        """Delete a reservation; it may be gone already. ``conflict`` while jobs run in it."""
        words = _words(name, {}, "ReservationName")
        self._run(("scontrol", "delete", *words), retry=True, allow=("not_found",))


def partition_name(text: str) -> str:
    """The text if it can name a partition. Raises ValueError."""
    if _NAME.fullmatch(text) is None:
        raise ValueError(f"not a name of a partition: {text[:80]!r}")
    return text


def _words(name: str, settings: Mapping[str, str], kind: str = "PartitionName") -> list[str]:
    argv = ("scontrol", kind, name[:80])
    try:
        words = [f"{kind}={partition_name(name)}"]
    except ValueError as error:
        raise SlurmError("invalid", argv, str(error)) from None
    for key, value in settings.items():
        if _VALUE.fullmatch(value) is None:
            raise SlurmError("invalid", argv, f"{key}={value[:80]!r} is no value for it")
        words.append(f"{key}={value}")
    return words
