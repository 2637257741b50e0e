"""A closer look at ranks that make no step: torch's flight recorders.

All text comes from the user's programs. robust-task cleans and bounds it.
"""

from __future__ import annotations

from srun_wrapper.locate.recorded import Recorded
from srun_wrapper.protocol.base import Message, Reply


class LookCloser(Message):
    """Order: read the flight recorders of all ranks."""

    token: int


class LookedCloser(Reply):
    """A slot's answer to LookCloser."""

    local: int
    recorded: tuple[Recorded, ...] = ()
