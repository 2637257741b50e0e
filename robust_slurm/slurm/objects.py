"""Orders about partitions and reservations: of root, SlurmUser and Slurm's administrators only.

A name of a node that Slurm does not know is refused, but the partition is left with no usable
node all the same (22.05): look names up before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from robust_slurm.slurm.ask import Questions
from robust_slurm.slurm.errors import SlurmError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}", re.ASCII)
_VALUE = re.compile(r"[A-Za-z0-9_.,:\[\]-]*", re.ASCII)


class Objects(Questions):
    """Adds to the questions what makes, changes and removes partitions and reservations.

    Partitions live in slurmctld's memory: a reconfigure or restart brings back slurm.conf's.
    Reservations outlive both.
    """

    def create_partition(self, name: str, settings: Mapping[str, str]) -> None:
        """``settings`` as slurm.conf names them; never retried. ``denied`` without the right."""
        self._run(("scontrol", "create", *_words(name, settings)))

    def update_partition(self, name: str, settings: Mapping[str, str]) -> None:
        """Change settings of a partition; Nodes="" takes all its nodes. Jobs there go on."""
        self._run(("scontrol", "update", *_words(name, settings)), retry=True)

    def create_reservation(self, name: str, settings: Mapping[str, str]) -> None:
        """``settings`` as scontrol names them (StartTime, Duration, Nodes, Users, Flags).

        Never retried. ``conflict`` where jobs run on the nodes, unless Flags say IGNORE_JOBS.
        """
        words = _words(name, settings, "ReservationName")
        self._run(("scontrol", "create", *words))

    def delete_reservation(self, name: str) -> None:
        """``conflict`` while jobs run in it. One that is gone is no error."""
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
