"""The tags of messages, by which a robust-task and a robust-srun of other releases know them."""

from __future__ import annotations

from typing import get_args

import msgspec

from srun_wrapper.protocol.messages import (
    FromAgent,
    FromShim,
    Message,
    PeerAsk,
    PeerSay,
    Report,
    Started,
    ToAgent,
    ToShim,
    encode,
)

RELEASED = {
    *("FindFiles", "FoundFiles"),
    *("Ack", "Alarm", "Committed", "Complete", "Counted", "Enrolled", "Exited", "Fetch", "Finish"),
    *("Flush", "Hello", "Imports", "Inspect", "Inspected", "Logged", "LookCloser", "LookedCloser"),
    *(
        "MakeRoom",
        "Moved",
        "PeerAsk",
        "PeerSay",
        "PersistAt",
        "Persisted",
    ),
    *("ReplicaTargets", "Report", "Resumed", "RunTests", "SaveEvery", "Saved"),
    *("Signal", "Signalled", "SlotHello", "SlotLost", "SlotWelcome", "Stalled", "StandAt"),
    *("Start", "Started", "StdinRead", "Stock", "Stop", "Stopped", "StoreReady"),
    *("TakeStock", "Unshare", "WarmRanks", "Warmup", "WorkerEnded", "Wrote"),
}
"""Tags that releases send. Add new ones; never change one, even if its class is renamed."""


def test_messages_keep_their_tags() -> None:
    unions = [get_args(union) for union in (FromShim, ToShim, FromAgent, ToAgent)]
    kinds: set[type[Message]] = set().union({PeerAsk, PeerSay}, *unions)
    assert {str(kind.__struct_config__.tag) for kind in kinds} == RELEASED


def test_the_tag_is_the_first_element_on_the_wire() -> None:
    started = Started(1, 2, 3, 4)
    assert msgspec.msgpack.decode(encode(started)) == ["Started", 1, 2, 3, 4, False, False]
    assert msgspec.msgpack.decode(encode(Report(1, ())))[0] == "Report"
