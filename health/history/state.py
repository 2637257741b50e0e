"""Compute a node's state from its events: open faults, recurring faults, what to do. Pure.

A fault is open until its action was done: a reset of the GPU, a reload of the driver or a boot
closes a fault that needs a reset, a boot one that needs a reboot, and only a repair by a person one
that needs service. A fault that recurs too often needs the next stronger action.

The driver writes nothing when a GPU is reset. A reset is known from: an event "reset" (somebody
recorded it), the driver loaded again, a boot, an undrain (which only follows a passing re-check),
or NVML's recovery action that was "reset" by Xid 154 and is "none" now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from health.finding import ActionName, harder, rung
from health.history.cures import SETTLE_S, Driver, noticed_resets
from health.node.system import Event
from health.nvidia import xid
from health.nvidia.xid_policy import Occurrence, incidents, judge, order, words
from robust_slurm.text import counted

DAY = 86400.0


class StateRules(NamedTuple):
    """The rules that a site can set."""

    overrides: Mapping[int, ActionName] = {}
    returns: int = 2  # recurrences of a fault after its cure before the next stronger action
    return_days: float = 14.0
    reboots: int = 2  # reboots for a cause in that time; one more means service
    contained: int = 3  # contained memory errors (94) since the last reset
    wear_days: float = 28.0
    strikes: int = 3  # lemon: strikes over so many jobs …
    users: int = 2  # … of so many users …
    accounts: int = 2  # … and of so many of Slurm's accounts, as far as they are known, …
    lemon_days: float = 28.0  # … in so many days


class Fault(NamedTuple):
    """An open fault. ``action`` is what it needs now, ``base`` what it needed the first time."""

    check: str
    gpu: str
    unit: str
    code: int
    action: ActionName
    base: ActionName
    since: float  # wall clock
    last: float
    times: int
    text: str
    why: str


class Note(NamedTuple):
    """A remark worth reporting that closes nothing."""

    check: str
    gpu: str
    unit: str
    code: int
    action: ActionName
    last: float
    times: int
    text: str


class NodeState(NamedTuple):
    """``wear``: per GPU how many messages of which codes in wear_days. ``reboots``: evidence of
    too many reboots for a cause, ``lemon``: of a lemon; both empty if it is none."""

    faults: tuple[Fault, ...]
    notes: tuple[Note, ...]
    wear: Mapping[str, Mapping[int, int]]
    reboots: str
    lemon: str

    @property
    def action(self) -> ActionName:
        """The hardest action that anything here needs."""
        out: ActionName = "service" if self.reboots or self.lemon else "none"
        for fault in self.faults:
            out = harder(out, fault.action)
        return out


class _Track:
    """One fault of one GPU over time."""

    def __init__(self) -> None:
        self.open: Fault | None = None
        self.linked = False
        self.seen = False
        self.cures: set[str] = set()  # since it was seen last
        self.returns: list[tuple[float, str]] = []  # when it came back, after what cure

    def occur(self, found: Occurrence, rules: StateRules) -> None:
        event = found.event
        if self.open is None and self.seen and self.cures:
            cure = "boot" if "boot" in self.cures else "reset"
            self.returns.append((event.time, cure))
        self.seen = True
        self.cures.clear()
        recent = [c for t, c in self.returns if t > event.time - rules.return_days * DAY]
        action, why = escalate(found.action, recent, rules)
        times = _times(event)
        new = Fault(
            found.check,
            found.gpu,
            _switch(event),
            found.code,
            action,
            found.action,
            event.time,
            xid.end(event),
            times,
            xid.word(event, "text"),
            "; ".join(text for text in (found.why, why) if text),
        )
        old = self.open
        if old is None:
            self.open, self.linked = new, found.linked
            return
        keep = old if rung(old.action) >= rung(action) else new
        last, base = max(old.last, new.last), harder(old.base, new.base)
        self.linked = self.linked and found.linked
        self.open = keep._replace(since=old.since, last=last, base=base, times=old.times + times)

    def cure(self, kind: str, time: float) -> None:
        """A "reset" or "boot" at ``time``."""
        if self.open:
            limit: ActionName = "reboot" if kind == "boot" else "reset-gpu"
            if rung(self.open.action) > rung(limit) or self.open.last > time:
                return
            self.open = None
        self.cures.add(kind)


def escalate(action: ActionName, cures: Sequence[str], rules: StateRules) -> tuple[ActionName, str]:
    """The action of a fault that came back after these cures ("reset", "boot"), and why."""
    boots, days = cures.count("boot"), f"in {rules.return_days:g} days"
    if action in ("reset-gpu", "reboot") and boots >= rules.returns:
        return "service", f"came back after {boots} reboots {days}"
    if action == "reset-gpu" and len(cures) >= rules.returns:
        return "reboot", f"came back after {counted(len(cures), 'reset')} {days}"
    return action, ""


def node_state(
    events: Iterable[Event],
    now: float,
    boot: str,
    driver: Driver = Driver(),  # noqa: B008 (immutable)
    rules: StateRules = StateRules(),  # noqa: B008
) -> NodeState:
    """The state of a node after these events (history and log merged, in any order)."""
    known = list(events)
    known = _unrepaired(known, now, boot)
    known += noticed_resets(known, now, boot, driver)
    tracks: dict[tuple[str, str], _Track] = {}
    notes: list[Note] = []
    wear: dict[str, dict[int, int]] = {}
    causes: set[str] = set()
    for this in _boots(known, boot):
        mine = [event for event in known if event.boot == this]
        contained: dict[str, int] = {}
        for time, item in _timeline(mine, rules, driver.branch if this == boot else 0):
            if isinstance(item, Occurrence):
                if item.check == "xid-94" and not item.closes:
                    contained[item.gpu] = contained.get(item.gpu, 0) + 1
                    if contained[item.gpu] >= rules.contained:
                        why = f"{counted(contained[item.gpu], 'time')} since the last reset"
                        item = item._replace(action="reset-gpu", closes=True, why=why)
                if item.closes:
                    tracks.setdefault((item.gpu, item.fault), _Track()).occur(item, rules)
                elif this == boot:
                    notes.append(_note(item))
                if item.check == "xid-wear" and time > now - rules.wear_days * DAY:
                    codes = wear.setdefault(item.gpu, {})
                    codes[item.code] = codes.get(item.code, 0) + _times(item.event)
            else:
                _reset(item, tracks, contained)
        if this != boot:
            newest = max(event.time for event in mine)
            if newest > now - rules.return_days * DAY and _needed_reboot(mine, tracks.values()):
                causes.add(this)
            for track in tracks.values():
                track.cure("boot", float("inf"))
    faults = [t.open for t in tracks.values() if t.open and not _closed(t, t.open, now, driver)]
    reboots = ""
    if len(causes) > rules.reboots:
        reboots = f"{counted(len(causes), 'reboot')} for a cause in {rules.return_days:g} days"
    return NodeState(
        tuple(sorted(faults, key=lambda f: (-rung(f.action), f.since, f.gpu, f.check))),
        tuple(sorted(_power_smoothing(notes), key=lambda n: (n.gpu, n.code, n.last))),
        wear,
        reboots,
        _lemon(known, now, rules),
    )


def _unrepaired(events: Sequence[Event], now: float, boot: str) -> list[Event]:
    """Return the events that no repair came after.

    Times decide, unless a clock was wrong: all of earlier boots is before a repair in the running
    one, and what stands before a repair but is dated after it, or in the future, is before it.
    """
    repairs = [(place, event) for place, event in enumerate(events) if event.kind == "repaired"]
    # A repair dated in the future must not hide the faults until that time.
    dated = [event for _, event in repairs if event.time <= now + SETTLE_S]
    own = max((event.time for event in dated if event.boot in ("", boot)), default=-1.0)
    every = max((event.time for event in dated), default=-1.0)
    of_boot = {event.boot: (place, event.time) for place, event in repairs if event.boot}
    newest = max((place for place, _ in repairs), default=-1)

    def before(place: int, event: Event) -> bool:
        if xid.end(event) <= (own if event.boot == boot else every):
            return True
        at, time = of_boot.get(event.boot, (-1, 0.0))
        if place < at and event.time > time:
            return True
        earlier = event.boot not in ("", boot)
        return earlier and (boot in of_boot or (place < newest and event.time > now + SETTLE_S))

    return [event for place, event in enumerate(events) if not before(place, event)]


def _boots(events: Sequence[Event], boot: str) -> list[str]:
    """Boot ids in order, the running one last. Events that other nodes wrote have none."""
    first: dict[str, float] = {}
    for event in (event for event in events if event.boot):
        first[event.boot] = min(event.time, first.get(event.boot, event.time))
    first.pop(boot, None)
    return [*sorted(first, key=lambda b: (first[b], b)), boot]


def _timeline(
    events: Sequence[Event], rules: StateRules, branch: int
) -> list[tuple[float, Occurrence | Event]]:
    """The occurrences in one boot and the cures between them, oldest first.

    A cure at the very time of a message counts as earlier.
    """
    out: list[tuple[float, int, str, Occurrence | Event]] = []
    for event in events:
        if event.kind in ("driver", "reset", "undrain"):
            out.append((event.time, 0, str(order(event)), event))
    for incident in incidents(events):
        for found in judge(incident, rules.overrides, branch):
            out.append((found.event.time, 1, str(order(found.event)), found))
        for gpu, (time, word) in words(incident).items():
            if word == 0:
                out.append((time, 2, gpu, Event(time, "none", "", {"gpu": gpu})))
    out.sort(key=lambda item: item[:3])
    return [(time, item) for time, _, _, item in out]


def _reset(event: Event, tracks: Mapping[tuple[str, str], _Track], seen: dict[str, int]) -> None:
    """Apply a reset of one GPU, or of all and the switches; or the driver's word "none"."""
    gpu = xid.word(event, "gpu") if event.kind in ("reset", "none") else ""
    for (place, _), track in tracks.items():
        if gpu in ("", place) and (event.kind != "none" or track.linked):
            track.cure("reset", event.time)
    if event.kind in ("driver", "reset"):
        for place in list(seen):
            if gpu in ("", place):
                del seen[place]


def _closed(track: _Track, fault: Fault, now: float, driver: Driver) -> bool:
    """True if NVML's present answers close a fault of the running boot."""
    if fault.check == "gpu-init-failed":
        return fault.gpu in driver.alive
    said_none = driver.words.get(fault.gpu) == 0 and fault.last <= now - SETTLE_S
    return said_none and track.linked and fault.action == "reset-gpu"


def _needed_reboot(events: Iterable[Event], tracks: Iterable[_Track]) -> bool:
    """True if the boot with these events ended because of something that a reboot cures."""
    drained = any(e.kind == "drain" and xid.word(e, "action") == "reboot" for e in events)
    return drained or any(t.open and t.open.action == "reboot" for t in tracks)


def _times(event: Event) -> int:
    return max(1, int(xid.number(event, "count")))


def _switch(event: Event) -> str:
    return xid.word(event, "unit") if event.kind == "sxid" else ""


def _note(found: Occurrence) -> Note:
    event = found.event
    where = (found.gpu, _switch(event), found.code, found.action)
    return Note(found.check, *where, xid.end(event), _times(event), xid.word(event, "text"))


def _power_smoothing(notes: Sequence[Note]) -> list[Note]:
    """Drop notes that power smoothing is on (162), and those that it was off (163) before that."""
    on = {note.gpu: note.last for note in sorted(notes, key=lambda n: n.last) if note.code == 162}
    return [
        note
        for note in notes
        if note.code != 162 and not (note.code == 163 and on.get(note.gpu, -1.0) >= note.last)
    ]


def strikes_of(events: Iterable[Event]) -> list[Event]:
    """The strikes whose report was not withdrawn."""
    known = list(events)
    wrong = {(e.data.get("job"), e.data.get("name")) for e in known if e.kind == "withdrawn"}
    strikes = [event for event in known if event.kind == "strike"]
    return [e for e in strikes if (e.data.get("job"), e.data.get("name")) not in wrong]


def _lemon(events: Iterable[Event], now: float, rules: StateRules) -> str:
    """Strikes over enough jobs of enough users and accounts; "" if not."""
    recent = [e for e in strikes_of(events) if abs(now - e.time) < rules.lemon_days * DAY]
    jobs = {xid.number(event, "job") for event in recent}
    users = {xid.number(event, "uid") for event in recent}
    accounts = {event.data.get("account") or xid.number(event, "uid") for event in recent}
    if len(jobs) < rules.strikes or len(users) < rules.users or len(accounts) < rules.accounts:
        return ""
    who = f"{counted(len(jobs), 'job')} of {counted(len(users), 'user')}"
    return f"{who} failed here in {rules.lemon_days:g} days"
