"""Messages between agents about whether they still hear the supervisor."""

from __future__ import annotations

from srun_wrapper.protocol.base import Message


class PeerAsk(Message):
    job_id: int


class PeerSay(Message):
    """``silent``: seconds since this agent last heard the supervisor."""

    index: int
    silent: float
