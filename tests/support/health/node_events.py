"""Events of a node as its ledger has them, and the state that follows from them."""

from __future__ import annotations

from typing import Any

from health.history.cures import Driver
from health.history.state import DAY, NodeState, StateRules, node_state
from health.node.system import Event

NOW = 100 * DAY
GPU, OTHER = "0000:3b:00.0", "0000:86:00.0"
TEXT_154 = "GPU recovery action changed from 0x0 (None) to 0x{} (x)"


def xid(code: int, ago: float = 600.0, gpu: str = GPU, text: str = "", **more: Any) -> Event:
    """An Xid ``ago`` seconds before NOW."""
    boot = more.pop("boot", "now")
    line = f"NVRM: Xid (PCI:{gpu[:-2]}): {code}, {text}"
    last = more.pop("lasted", 0.0)
    data = {"gpu": gpu, "code": code, "at": 0.0, "last": last, "count": 1, "text": line} | more
    return Event(NOW - ago, "xid", boot, data)


def word(number: int, ago: float = 599.0, gpu: str = GPU) -> Event:
    return xid(154, ago, gpu, TEXT_154.format(number))


def did(kind: str, ago: float, boot: str = "now", **data: Any) -> Event:
    return Event(NOW - ago, kind, boot, data)


def state(*events: Event, driver: Driver = Driver(), **rules: Any) -> NodeState:  # noqa: B008
    return node_state(events, NOW, "now", driver, StateRules(**rules))


def faults(*events: Event, **kwargs: Any) -> list[tuple[str, str]]:
    return [(fault.check, fault.action) for fault in state(*events, **kwargs).faults]


def notes(*events: Event) -> list[str]:
    return [note.check for note in state(*events).notes]


def strike(job: int, uid: int, ago: float = DAY, **more: str) -> Event:
    return did("strike", ago, job=job, uid=uid, check="accused", **more)
