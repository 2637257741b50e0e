"""The messages: what is sent is what arrives, also between versions."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srun_wrapper.protocol import messages as m

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NUMBER = st.integers(-(1 << 63), (1 << 63) - 1)
REAL = st.floats(allow_nan=False)


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is bytes:
        return st.binary(max_size=20)
    if kind in (int, str, float, bool, type(None)):
        return {int: NUMBER, str: TEXT, float: REAL, bool: st.booleans()}.get(kind, st.none())
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(strategy(args[0]), max_size=3).map(tuple)
        return st.tuples(*map(strategy, args))
    if origin is dict:
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return struct(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        fields = typing.get_type_hints(kind).values()
        return st.tuples(*map(strategy, fields)).map(lambda values: kind(*values))
    return st.one_of(*map(strategy, args))


def struct(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, *(strategy(hints[name]) for name in kind.__struct_fields__))


DOORS = {
    "from_shim": (m.FromShim, m.decode_from_shim),
    "to_shim": (m.ToShim, m.decode_to_shim),
    "from_agent": (m.FromAgent, m.decode_from_agent),
    "to_agent": (m.ToAgent, m.decode_to_agent),
}
CASES = [
    pytest.param(kind, decode, id=f"{door}-{kind.__name__}")
    for door, (union, decode) in DOORS.items()
    for kind in typing.get_args(union)
]


@pytest.mark.parametrize(("kind", "decode"), CASES)
def test_round_trip(kind: type[m.Message], decode: typing.Callable[[bytes], m.Message]) -> None:
    @settings(deadline=None, max_examples=25)
    @given(struct(kind))
    def check(message: m.Message) -> None:
        again = decode(m.encode(message))
        assert type(again) is kind
        assert again == message

    check()


@pytest.mark.parametrize(("kind", "decode"), CASES)
def test_an_older_reader_skips_new_fields(
    kind: type[m.Message], decode: typing.Callable[[bytes], m.Message]
) -> None:
    @settings(deadline=None, max_examples=5)
    @given(struct(kind))
    def check(message: m.Message) -> None:
        newer = [*msgspec.msgpack.decode(m.encode(message)), "from the future", 7]
        assert decode(msgspec.msgpack.encode(newer)) == message

    check()


def test_an_older_writer_leaves_out_new_fields() -> None:
    exited = m.Exited(1, 2, 3, 4, None, 0.5, "tail")
    words = msgspec.msgpack.decode(m.encode(exited))
    for newest in (1, 2):
        assert m.decode_from_agent(msgspec.msgpack.encode(words[:-newest])) == exited


def test_a_slot_s_activity_has_no_name_on_the_wire() -> None:
    """An older supervisor reads what a newer robust-task sends: values in their places."""
    activity = m.SlotActivity(1, "R", 0.5, 7, ("mul (a.py:2)",), True)
    inspected = m.Inspected(5, 0.1, (activity,))
    assert msgspec.msgpack.decode(m.encode(inspected)) == [
        *("Inspected", 5, 0.1),
        [[1, "R", 0.5, 7, ["mul (a.py:2)"], True, [], None, ""]],
        *([], None),
    ]


@pytest.mark.parametrize("door", sorted(DOORS))
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xc1",
        msgspec.msgpack.encode(["Nonsense", 1]),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"type": "Stop"}),
        msgspec.msgpack.encode(["Hello"]),
        msgspec.msgpack.encode(["Stop", "now", "soon"]),
    ],
)
def test_garbage_is_refused(door: str, data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        DOORS[door][1](data)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_a_message(data: bytes) -> None:
    try:
        assert isinstance(m.decode_from_agent(data), m.Message)
    except ValueError:  # msgspec's errors and UnicodeDecodeError
        pass


def test_doors_keep_directions_apart() -> None:
    with pytest.raises(msgspec.ValidationError):
        m.decode_from_agent(m.encode(m.Finish(((0, 0),))))
    with pytest.raises(msgspec.ValidationError):
        m.decode_to_shim(m.encode(m.Ack(1, 0.25)))


def test_peer_questions() -> None:
    assert m.decode_ask(m.encode(m.PeerAsk(5))) == m.PeerAsk(5)
    assert m.decode_say(m.encode(m.PeerSay(2, 3.5))) == m.PeerSay(2, 3.5)
