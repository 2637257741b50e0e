"""The wire codec: framing, authenticity, limits."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.frames.wire import (
    MAC,
    MAGIC,
    MAX_FIRST_FRAME,
    MAX_FRAME,
    PREFACE,
    VERSION,
    Codec,
    WireError,
)

KEY = b"k" * 32
PAYLOADS = st.lists(st.binary(max_size=300), min_size=1, max_size=8)


def pair(server_key: bytes = KEY, client_key: bytes = KEY) -> tuple[Codec, Codec]:
    """A server and a client that have exchanged prefaces."""
    server, client = Codec(server_key, server=True), Codec(client_key, server=False)
    assert server.feed(client.preface()) == []
    assert client.feed(server.preface()) == []
    return server, client


def cut(data: bytes, at: list[int]) -> list[bytes]:
    ends = [0, *sorted(min(a, len(data)) for a in at), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


@settings(deadline=None)
@given(PAYLOADS, PAYLOADS)
def test_both_directions(to_server: list[bytes], to_client: list[bytes]) -> None:
    server, client = pair()
    assert server.ready and client.ready and not server.trusted
    assert server.feed(b"".join(map(client.seal, to_server))) == to_server
    assert client.feed(b"".join(map(server.seal, to_client))) == to_client
    assert server.trusted and client.trusted


@settings(deadline=None)
@given(PAYLOADS, st.lists(st.integers(0, 3000), max_size=12))
def test_any_split_gives_the_same_messages(payloads: list[bytes], at: list[int]) -> None:
    server, client = Codec(KEY, server=True), Codec(KEY, server=False)
    client.feed(server.preface())
    stream = client.preface() + b"".join(map(client.seal, payloads))
    got = [payload for piece in cut(stream, at) for payload in server.feed(piece)]
    assert got == payloads


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(PAYLOADS, st.data())
def test_a_flipped_bit_is_never_a_wrong_message(payloads: list[bytes], data: st.DataObject) -> None:
    server, client = Codec(KEY, server=True), Codec(KEY, server=False)
    client.feed(server.preface())
    stream = bytearray(client.preface() + b"".join(map(client.seal, payloads)))
    bit = data.draw(st.integers(0, len(stream) * 8 - 1))
    stream[bit // 8] ^= 1 << bit % 8
    got: list[bytes] = []
    with pytest.raises(WireError):
        for i in range(len(stream)):
            got += server.feed(bytes(stream[i : i + 1]))
        # A length that grew waits for more; whatever comes cannot make it authentic.
        server.feed(bytes(MAX_FRAME))
    assert got == payloads[: len(got)] and len(got) < len(payloads)


def test_replay_to_a_new_server_fails() -> None:
    server, client = Codec(KEY, server=True), Codec(KEY, server=False)
    client.feed(server.preface())
    recorded = client.preface() + client.seal(b"hello") + client.seal(b"finish")
    assert server.feed(recorded) == [b"hello", b"finish"]
    another = Codec(KEY, server=True)
    with pytest.raises(WireError, match="not authentic"):
        another.feed(recorded)
    assert not another.trusted


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1, 1)])
def test_repeated_or_reordered_frames_fail(order: tuple[int, int]) -> None:
    server, client = pair()
    frames = [client.seal(b"zero"), client.seal(b"one")]
    with pytest.raises(WireError):
        server.feed(b"".join(frames[i] for i in order))


def test_reflected_frames_fail() -> None:
    server, _client = pair()
    with pytest.raises(WireError):
        server.feed(server.seal(b"mine"))


def test_another_key_fails_both_ways() -> None:
    server, client = pair(KEY, b"x" * 32)
    with pytest.raises(WireError, match="another step's key"):
        server.feed(client.seal(b"hello"))
    with pytest.raises(WireError, match="another step's key"):
        client.feed(server.seal(b"order"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak"),
        (b"SS", "does not speak"),
        (b"RBSX" + bytes(40), "does not speak"),
        (MAGIC + bytes([VERSION + 1]) + bytes(16), f"version {VERSION + 1}"),
    ],
)
def test_strangers_are_named(data: bytes, says: str) -> None:
    with pytest.raises(WireError, match=says):
        Codec(KEY, server=True).feed(data)


def test_a_slow_preface_is_awaited() -> None:
    codec, other = Codec(KEY, server=True), Codec(KEY, server=False)
    for byte in other.preface()[:-1]:
        assert codec.feed(bytes([byte])) == []
        assert not codec.ready
    codec.feed(other.preface()[-1:])
    assert codec.ready
    assert len(other.preface()) == PREFACE


def test_sealing_before_the_preface() -> None:
    with pytest.raises(WireError, match="not authenticated"):
        Codec(KEY, server=True).seal(b"x")


@pytest.mark.parametrize("size", [MAX_FIRST_FRAME + 1, MAX_FRAME + 1, (1 << 32) - 1])
def test_a_stranger_cannot_make_us_buffer_much(size: int) -> None:
    server, _client = pair()
    with pytest.raises(WireError, match="over the limit"):
        server.feed(struct.pack(">I", size) + bytes(MAC))


def test_limits_of_a_trusted_peer() -> None:
    server, client = pair()
    server.feed(client.seal(b"first"))
    assert [len(p) for p in server.feed(client.seal(bytes(MAX_FRAME)))] == [MAX_FRAME]
    with pytest.raises(ValueError, match="over the limit"):
        client.seal(bytes(MAX_FRAME + 1))
    with pytest.raises(WireError):
        server.feed(struct.pack(">I", MAX_FRAME + 1) + bytes(MAC))


def test_short_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        Codec(b"short", server=True)
