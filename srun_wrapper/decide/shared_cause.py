"""Judge silent nodes: each is bad by itself, or all of them share one cause (pure).

A switch, a file system, a paused machine or an outage of the supervisor's own link makes many
nodes silent at once. None of them is bad, and to replace them costs more than to wait. Where only
one or two nodes of many are silent, no shared cause is assumed: they are lost at once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Key = TypeVar("Key", bound=Hashable)
Kind = Literal["unreachable", "mute"]
Verdict = Literal["wait", "lost", "replace"]
"""``replace``: the time to wait is over, and there is no evidence against the node itself."""

FEW = 2  # silent nodes that are taken for bad ones, however small the job
SHARE = 0.05  # of the nodes: likewise, in a large job
AFTERMATH = 2.0  # s after the last return that one more node may need: ports come up one by one


@dataclass(frozen=True, slots=True)
class Silence:
    """One node that is silent. Times are monotonic seconds.

    ``kind``: ``unreachable``: its host answers no attempt; ``mute``: only its kernel answers.
    ``proven``: start of the attempt that has proven it; None: no attempt has done so yet.
    """

    kind: Kind
    since: float  # time of the last message
    proven: float | None = None


@dataclass(slots=True)
class SharedEvent(Generic[Key]):
    """A shared cause at work, described by the nodes that it makes silent."""

    kind: Kind
    why: str
    began: float
    noticed: float  # the limit for waiting counts from here
    nodes: set[Key]
    silent: set[Key]  # of its nodes, those that are silent still
    ebbed: float | None = None  # when most of its nodes were back; later, when one more was
    expired: bool = False  # it lasted longer than the limit
    told: bool = False  # the user was told that it expired


def common(affected: int, nodes: int) -> bool:
    """Return whether a symptom that so many nodes of a job show at once has one cause."""
    return affected > max(FEW, SHARE * nodes) or 1 < affected == nodes


def shared(
    silent: Mapping[Key, Silence], nodes: Collection[Key], own: Key | None, elsewhere: float
) -> str:
    """Return why these nodes, all silent in one way, share a cause; "" if they need not.

    ``nodes``: all of the job; ``own``: the supervisor's; ``elsewhere``: when another host, outside
    of these nodes, last answered the supervisor.
    """
    if not silent:
        return ""
    mute = [s for s in silent.values() if s.kind == "mute"]
    if own is not None and own in silent:
        if len(mute) == 1 and len(nodes) > 1:
            return ""  # others are heard, and robust-srun runs there: only its robust-task hangs
        return "the node of robust-srun is among them"
    if len(silent) > max(FEW, SHARE * len(nodes)):
        return f"{len(silent)} of {len(nodes)} nodes"
    others = [node for node in nodes if node != own]
    if not all(node in silent for node in others):
        return ""
    if len(mute) == 1:
        return ""  # its kernel answers, so no link is down; the supervisor's own node works
    if len(silent) == 1 and elsewhere > next(iter(silent.values())).since:
        return ""  # one node, and the supervisor's own network works
    return "every node but that of robust-srun"


class SharedCauses(Generic[Key]):
    """Follows the shared causes at work. ``limits``: s to wait for the end of each kind."""

    def __init__(self, limits: Mapping[Kind, float]) -> None:
        self.limits = limits
        self.events: dict[Kind, SharedEvent[Key]] = {}

    def judge(
        self,
        now: float,
        silent: Mapping[Key, Silence],
        nodes: Collection[Key],
        own: Key | None,
        elsewhere: float,
    ) -> dict[Key, Verdict]:
        """Return the verdict on each node that is proven to be silent."""
        verdicts: dict[Key, Verdict] = {}
        for kind, limit in self.limits.items():
            group = {key: s for key, s in silent.items() if s.kind == kind}
            event = self._follow(kind, now, group, shared(group, nodes, own, elsewhere))
            if event is not None and now >= event.noticed + limit:
                event.expired = True
            for key, silence in group.items():
                if silence.proven is not None:
                    verdicts[key] = _verdict(event, silence.proven)
        return verdicts

    def suspected(
        self,
        silent: Mapping[Key, Silence],
        nodes: Collection[Key],
        own: Key | None,
        elsewhere: float,
    ) -> bool:
        """Return whether nodes are silent, proven or not, that share a cause."""
        groups = ({k: s for k, s in silent.items() if s.kind == kind} for kind in self.limits)
        return any(shared(group, nodes, own, elsewhere) for group in groups)

    def _follow(
        self, kind: Kind, now: float, group: Mapping[Key, Silence], why: str
    ) -> SharedEvent[Key] | None:
        event = self.events.get(kind)
        if not group:
            self.events.pop(kind, None)
            return None
        if event is None:
            if why and any(s.proven is not None for s in group.values()):
                began = min(s.since for s in group.values())
                event = self.events[kind] = SharedEvent(
                    kind, why, began, now, set(group), set(group)
                )
            return event
        event.nodes |= set(group)
        back, event.silent = not event.silent <= set(group), set(group)
        if why:
            event.ebbed = None
        elif event.ebbed is None or back:
            event.ebbed = now
        return event

    def slept(self, now: float) -> None:
        """Count from now on: this process slept, and could hear no node."""
        for event in self.events.values():
            event.began = event.noticed = now


def _verdict(event: SharedEvent[Key] | None, proven: float) -> Verdict:
    if event is None:
        return "lost"
    if event.expired:
        return "replace"
    if event.ebbed is not None and proven > event.ebbed + AFTERMATH:
        return "lost"  # it stays gone although the others are back
    return "wait"
