"""Judge what the supervisor's silence means to an agent (pure)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

DEAD_SUPERVISOR = 5.0  # s during which the living host refuses the connection
DEAD_IN_THE_END = 0.5  # s of that once Slurm ends the step: its SIGKILL follows after KillWait
SLEPT = 2.0  # s between two looks after which this process was stopped, or its machine paused
START = 60.0  # s to reach the supervisor for the first time


class SilenceVerdict(enum.Enum):
    FINE = "fine"
    SUPERVISOR_DEAD = "robust-srun has died"
    HOST_LOST = "the host of robust-srun is lost"


@dataclass(slots=True)
class Contact:
    """An agent's knowledge of its connection. Times are monotonic seconds."""

    since: float  # last word from the supervisor (or when waiting began)
    ever: bool = False
    ending: bool = False  # Slurm has signalled this node's shims to end
    refused_since: float | None = None
    unreachable_since: float | None = None
    tried: float = 0.0  # when the last attempt was begun that found the host unreachable

    def heard(self, now: float) -> None:
        self.since = now
        self.ever = True
        self.refused_since = self.unreachable_since = None

    def slept(self, now: float) -> None:
        """Begin anew: this process did not run, so nobody could have been heard."""
        self.since = now
        self.refused_since = self.unreachable_since = None

    def lost(self, now: float, *, refused: bool, accepted: bool, begun: float) -> None:
        """A connection broke or could not be made.

        ``accepted``: the host's kernel took the connection, so the host lives. ``begun``: when the
        attempt was begun.
        """
        if refused:
            self.refused_since = self.refused_since or now
            self.unreachable_since = None
        elif accepted:
            self.refused_since = self.unreachable_since = None
        else:
            self.unreachable_since = self.unreachable_since or now
            self.tried = begun


def judge_silence(
    contact: Contact, now: float, lost_host: float, mute: float, first: float
) -> SilenceVerdict:
    """Decide from the last contact what has happened to the supervisor.

    An agent cannot tell a dead host from one that is cut off for a moment: ``lost_host`` is how
    long such an outage may last. An attempt begun after that must fail as well: one begun before
    may have missed the end of the outage. ``mute``: s in which the host accepts connections and
    says nothing; ``first``: s to reach it for the first time.
    """
    silent = now - contact.since
    refused = now - contact.refused_since if contact.refused_since is not None else 0.0
    if contact.ending and refused >= DEAD_IN_THE_END:
        return SilenceVerdict.SUPERVISOR_DEAD
    if not contact.ever:
        return SilenceVerdict.SUPERVISOR_DEAD if silent >= first else SilenceVerdict.FINE
    if refused >= DEAD_SUPERVISOR:
        return SilenceVerdict.SUPERVISOR_DEAD
    if contact.unreachable_since is not None and contact.tried - contact.since >= lost_host:
        return SilenceVerdict.HOST_LOST
    if silent >= mute:
        return SilenceVerdict.SUPERVISOR_DEAD
    return SilenceVerdict.FINE
