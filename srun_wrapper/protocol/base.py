"""Base classes of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages; the class name is the tag."""


class NumberedMessage(Message):
    """Base of the messages that must not be lost: numbered, kept until acknowledged, sent again."""

    number: int


class Reply(Message):
    """Base of the replies to a request; ``token`` is the request's."""

    token: int
