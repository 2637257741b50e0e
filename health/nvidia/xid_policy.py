"""The actions for one incident of Xids: catalogue, messages beside it, the site's table. Pure.

The order of authority: the site's [xid] table, the driver's own word (Xid 154), NVIDIA's rules for
messages that come together, the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from health.finding import ActionName, rung
from health.node.system import Event
from health.nvidia import nvlink5, xid, xid_lines
from health.nvidia.xid_catalog import SXIDS, XIDS

# NVML's recovery actions (also in Xid 154): none, reset the GPU, reboot the node, drain P2P, drain
# and reset, recover the IMEX domain, reset the bus, reboot the system. The same word means the same
# action here and in checks/gpu_recovery.py. After P2P was drained the driver names what follows.
RECOVERY: Mapping[int, ActionName] = {
    0: "none",
    1: "reset-gpu",
    2: "reboot",
    3: "clear-leftovers",
    4: "reset-gpu",
    5: "restart-imex",
    6: "reboot",
    7: "reboot",
    xid_lines.UNKNOWN_RECOVERY: "reboot",
}
_MEMORY = (48, 64, 95, 140, 171, 172)
_SAME_FAULT = dict.fromkeys(_MEMORY, "memory") | {119: "gsp", 120: "gsp", 175: "gsp", 79: "bus"}


class Occurrence(NamedTuple):
    """One message (or many equal ones) and what it asks for.

    ``check`` is the id of a condition of the family xid. ``closes``: no new work before the
    action. ``linked``: the driver's recovery action says whether this needs one. ``fault``: the
    name under which a recurrence counts as the same fault.
    """

    check: str
    action: ActionName
    closes: bool
    event: Event
    gpu: str
    code: int
    fault: str
    linked: bool = False
    why: str = ""


def incidents(events: Iterable[Event]) -> list[list[Event]]:
    """The events of one boot in groups: no more than BURST_S of silence, no reset in between."""
    out: list[list[Event]] = []
    finished = 0.0
    for event in sorted(events, key=order):
        if event.kind in ("driver", "reset", "undrain"):
            finished = float("-inf")
        elif event.kind in ("xid", "sxid", "lost"):
            if not out or event.time - finished > xid.BURST_S:
                out.append([])
            out[-1].append(event)
            finished = max(finished, xid.end(event))
    return out


def order(event: Event) -> tuple[float, int, str]:
    """A sort key that does not depend on the order in which events of one time were read."""
    faulty = event.kind in ("xid", "sxid", "lost")
    return event.time, int(faulty), f"{event.kind} {sorted(event.data.items(), key=str)}"


def judge(
    incident: Sequence[Event], overrides: Mapping[int, ActionName], branch: int
) -> list[Occurrence]:
    """Judge each message of one incident: the action it asks for; follow-ups ask for nothing.

    ``branch``: the driver's (580), 0 if unknown.
    """
    codes: dict[str, set[int]] = {}
    for event in incident:
        if event.kind == "xid":
            code = int(xid.number(event, "code"))
            codes.setdefault(xid.word(event, "gpu"), set()).add(code)
    said = {gpu: word for gpu, (_, word) in words(incident).items()}
    out = []
    for event in incident:
        if event.kind == "xid":
            found = _xid(event, incident, codes, said, overrides, branch)
        elif event.kind == "sxid":
            found = _sxid(event)
        else:
            found = _lost(event, codes, said, overrides, branch)
        if found:
            out.append(found)
    return _without_echo(out)


def words(incident: Iterable[Event]) -> dict[str, tuple[float, int]]:
    """The last recovery action that Xid 154 names for each GPU, and when it did."""
    out: dict[str, tuple[float, int]] = {}
    for event in incident:
        if event.kind == "xid" and xid.number(event, "code") == 154:
            changed = xid_lines.recovery(xid.word(event, "text"))
            now = changed[1] if changed else xid_lines.UNKNOWN_RECOVERY
            gpu = xid.word(event, "gpu")
            out[gpu] = max(out.get(gpu, (float("-inf"), 0)), (xid.end(event), now))
    return out


def _without_echo(found: list[Occurrence]) -> list[Occurrence]:
    """Leave out a 154 (or 159) beside a message that already asks for as much on that GPU."""
    out = []
    for one in found:
        others = (o for o in found if o.gpu == one.gpu and o.code != one.code and o.closes)
        hardest = max((rung(o.action) for o in others), default=0)
        if one.code in (154, 159) and one.check.startswith("xid-") and hardest >= rung(one.action):
            continue
        out.append(one)
    return out


def _xid(
    event: Event,
    incident: Sequence[Event],
    codes: Mapping[str, set[int]],
    said: Mapping[str, int],
    overrides: Mapping[int, ActionName],
    branch: int,
) -> Occurrence | None:
    gpu, code = xid.word(event, "gpu"), int(xid.number(event, "code"))
    beside = codes.get(gpu, set())
    name = f"xid-{code}"
    fault = _SAME_FAULT.get(code, str(code))

    def asks(check: str, action: ActionName = "none", linked: bool = False) -> Occurrence:
        return Occurrence(check, action, action != "none", event, gpu, code, fault, linked)

    if code in overrides:
        site = overrides[code]
        return asks(name, site)._replace(why="by the site") if site != "none" else None
    if code not in XIDS:
        return asks("xid-unlisted")
    since, action, cls = XIDS[code][4], cast("ActionName", XIDS[code][5]), XIDS[code][6]
    text = xid.word(event, "text")
    if code == 45:
        alone = not xid_lines.caused_by(text) and all(_is_45(other) for other in incident)
        # A cancelled job leaves the same message, so that alone it is no proof of anything.
        return asks(name, action)._replace(closes=False) if alone else None
    if code == 154:
        return _word(asks(name), said.get(gpu, xid_lines.UNKNOWN_RECOVERY))
    if code in (48, 171, 172):
        if code != 48 and 48 in beside:
            return None
        if 94 in beside and not beside & {63, 64, 95, 140}:
            return None  # contained: only the program that was hit has to end
    if code == 94:
        return asks(name)
    if code == 74 or nvlink5.FIRST <= code <= nvlink5.LAST:
        action = "reset-gpu" if _nvlink_resets(code, text) else "none"
        cls = "wear" if action == "none" else cls
    if action == "none":
        warning = {"user": "xid-app", "wear": "xid-wear"}.get(cls, "xid-unlisted")
        return asks(warning)
    linked = bool(since) and (gpu in said or branch >= since)
    found = asks(name, action, linked)
    return _word(found, said[gpu]) if linked and gpu in said else found


def _word(found: Occurrence, word: int) -> Occurrence | None:
    """The finding with the driver's action in place of the catalogue's; None: nothing is needed."""
    action = RECOVERY.get(word, "reboot")
    if action == "none":
        return None
    why = f"by the driver (Xid 154: {word})"
    return found._replace(action=action, closes=True, linked=True, why=why)


def _is_45(event: Event) -> bool:
    return event.kind == "xid" and int(xid.number(event, "code")) == 45


def _nvlink_resets(code: int, text: str) -> bool:
    if code == 74:
        link4 = nvlink5.read74(text)
        return link4.reset if link4 else True
    link5 = nvlink5.read(code, text)
    return link5.reset if link5 else "nonfatal" not in text.lower()


def _sxid(event: Event) -> Occurrence | None:
    gpu, code = xid.word(event, "gpu"), int(xid.number(event, "code"))
    line = xid_lines.parse(xid.word(event, "text"))
    kind, action, _ = SXIDS.get(code, ("", "watch", ""))

    def asks(check: str, action: ActionName) -> Occurrence:
        return Occurrence(check, action, action != "none", event, gpu, code, "sxid")

    if line and line.message[:5].lower() == "fatal":
        if kind == "always-fatal":
            return asks("sxid-always-fatal", "reboot")
        return asks("sxid-fatal", "reset-gpu")
    if kind == "non-fatal" and action == "reset-gpu":
        return asks("sxid-fatal", "reset-gpu")
    if kind == "non-fatal" and action == "none":
        return None
    return asks("sxid-nonfatal", "none")


def _lost(
    event: Event,
    codes: Mapping[str, set[int]],
    said: Mapping[str, int],
    overrides: Mapping[int, ActionName],
    branch: int,
) -> Occurrence | None:
    """A GPU lost without a number: the same as 79, unless 79 is there as well."""
    gpu = xid.word(event, "gpu")
    if xid.word(event, "form") == "init":
        return Occurrence("gpu-init-failed", "reboot", True, event, gpu, 0, "init")
    if 79 in codes.get(gpu, set()):
        return None
    action = overrides.get(79, "reboot")
    if action == "none":
        return None
    since = XIDS[79][4]
    linked = 79 not in overrides and (gpu in said or branch >= since)
    found = Occurrence("gpu-fell-off-bus", action, True, event, gpu, 0, "bus", linked)
    return _word(found, said[gpu]) if linked and gpu in said else found
