"""A store's event and its message hold the same, and it crosses the network so."""

from __future__ import annotations

from inspect import signature
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from robust_slurm.checkpoint.planning.interval import Cost
from robust_slurm.checkpoint.store.events import (
    AlarmEvent,
    CommittedEvent,
    EnrolledEvent,
    PersistedEvent,
    ResumedEvent,
    SavedEvent,
    StoreEvent,
)
from srun_wrapper.agent.snapshot_store import message_of
from srun_wrapper.protocol import checkpoint_messages
from srun_wrapper.protocol.base import Message
from srun_wrapper.protocol.messages import decode_from_shim, encode

COST = Cost(1.0, 2.0, 3.0, 4.0)
EVENTS: tuple[type[Any], ...] = get_args(StoreEvent)


@pytest.mark.parametrize("event", EVENTS)
def test_both_have_the_same_fields_of_the_same_types(event: type[Any]) -> None:
    message: type[Message] = getattr(checkpoint_messages, event.__name__.removesuffix("Event"))
    own = [name for name in message.__struct_fields__ if name not in ("number", "local")]
    assert own == list(event._fields)
    ones, others = get_type_hints(event), get_type_hints(message)
    assert {name: ones[name] for name in own} == {name: others[name] for name in own}
    defaults, theirs = signature(event).parameters, signature(message).parameters
    assert [defaults[n].default for n in own] == [theirs[n].default for n in own]


@pytest.mark.parametrize(
    ("event", "wire"),
    [
        (
            EnrolledEvent(3, 7, 8, {"dp": 8}, (6, 7), "/ckpt", 10, 1000, "", (4, 3), 2, 4),
            ["Enrolled", 0, 3, 2, 7, 8, {"dp": 8}, [6, 7], "/ckpt", 10, 1000, "", [4, 3], 2, 4],
        ),
        (
            SavedEvent(3, 7, 20, None, 9, 0.5, 0.25, ((20, 5),), COST, 19, (19,)),
            ["Saved", 3, 7, 20, None, 9, 0.5, 0.25, [[20, 5]], [1.0, 2.0, 3.0, 4.0], 19, [19]],
        ),
        (PersistedEvent(7, 20, False, "full", 0.5), ["Persisted", 0, 7, 20, False, "full", 0.5]),
        (CommittedEvent(20, True, ""), ["Committed", 0, 20, True, ""]),
        (AlarmEvent(-1, "no room"), ["Alarm", 0, -1, "no room"]),
        (ResumedEvent(3, 7, 20), ["Resumed", 0, 3, 7, 20]),
    ],
)  # fmt: skip
def test_an_event_crosses_the_network_as_its_message(event: Any, wire: list[Any]) -> None:
    message = message_of(event, local=2)
    assert msgspec.msgpack.decode(encode(message)) == wire
    assert decode_from_shim(encode(message)) == message
