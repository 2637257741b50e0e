"""Flaps: a node was unreachable for moments because its network was down, and not the node."""

from __future__ import annotations

from typing import NamedTuple

WINDOW = 300.0  # s after a flap in which the next one of the same node is evidence against it
NO_REBOOT = 10.0  # s; a machine that went down has not booted and brought its network up in less


class Flap(NamedTuple):
    """A time in which a node was unreachable, in monotonic seconds."""

    since: float  # the node's last message
    until: float  # when it answered again

    def text(self, name: str, now: float) -> str:
        """The flap as evidence, when the node is lost once more."""
        lasted, ago = self.until - self.since, now - self.until
        return f"{name}: lost before, {ago:.0f} s ago, when it answered again after {lasted:.1f} s"
