"""Messages about whether a node lives, reaches another, or still hears the supervisor."""

from __future__ import annotations

from srun_wrapper.protocol.base import Message, Reply


class PeerAsk(Message):
    job_id: int


class PeerSay(Message):
    """``silent``: seconds since this agent last heard the supervisor."""

    index: int
    silent: float


class Pulse(Message):
    """A node lives; sent between its reports, if ``Ack`` asks for it."""


class Reach(Message):
    """Order to an agent whose Hello says ``vouches``: try to connect to another node's agent.

    One attempt after another for ``seconds``, until one of them has an answer.
    """

    token: int
    host: str
    port: int
    seconds: float


class Reached(Reply):
    """The answer that an agent got: see ``server.Answer``; ``tried``: number of attempts."""

    answer: str
    tried: int
