"""Messages between nodes: the same values come out, or the connection breaks; nothing hangs."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, cast
from unittest.mock import MagicMock

import exchange_nodes
import numpy as np
import pytest
from exchange_nodes import KEY, LANES, PLAN, WINDOW, open_lane, source_of
from listed_source import ListedSource
from memory_source import MemorySource
from too_few_threads import refuse_once
from waiting import until

from robust_slurm.data.exchange import joining, link, wire
from robust_slurm.data.exchange.link import PeerLink
from robust_slurm.data.exchange.node import Exchange
from robust_slurm.data.exchange.wire import (
    MOST_BODY,
    PIECE,
    BrokenLine,
    CannotSend,
    FrameSocket,
    pack_metas,
    pack_samples,
    unpack_metas,
    unpack_samples,
)
from robust_slurm.data.lanes.budget import ReadBudget
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.plan import Plan
from robust_slurm.data.sample import Meta, Ref, Sample
from robust_slurm.frames.admission import MOST
from robust_slurm.frames.wire import Codec

LANE = ("web", 0)
REF = Ref("web", 0, 1, 2, 3)


def sample(**values: Any) -> Sample:
    return Sample(Meta(REF, 7), values)


def test_values_come_as_they_went() -> None:
    values = {
        "tokens": np.arange(5, dtype=np.uint16),
        "image": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "empty": np.zeros((0, 4), np.float16),
        "text": "é\ud800 text",
        "bytes": b"\0\1",
        "numbers": [1, 2.5, True, None, -(1 << 70), float("inf")],
        "nested": {"a": (1, [2], {}), "b": np.float32(1.5)},
        "when": np.array(["2026-11-26"], "datetime64[D]"),
    }
    described, body = pack_samples([sample(**values), sample()])
    got, bare = unpack_samples(LANE, json.loads(json.dumps(described)), b"".join(body))
    assert got.meta == Meta(REF, 7) and bare.values == {}
    assert repr(got.values) == repr(values)
    assert got.values["tokens"].flags.writeable
    metas = [(Meta(REF, 7), Position(1, 2, 3)), (Meta(REF._replace(record=4), 1), Position(2))]
    assert unpack_metas(LANE, pack_metas(metas)) == metas


@pytest.mark.parametrize("value", [object(), {1: 2}, {1}, np.array([object()]), np.zeros(1, "V3")])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(CannotSend):
        pack_samples([sample(value=value)])


def test_what_is_no_sample_is_refused() -> None:
    nested: Any = ["v", 1]
    for _ in range(10_000):
        nested = ["l", [nested]]
    for form in (
        ["v", [1]], ["x", 1], ["b", 4], ["b", -1], ["b", "1"], ["a", "|O", [1], 3],
            ["a", "O", [3], 3], ["a", "|u1,|u1", [1], 2], ["a", "|u1", [2, 2], 3],
        ["a", "<i4", [1], 3], ["a", "<i8", [1 << 40], 3], ["a", "|u1", [-3], 3], ["a", "|u1", 3, 3],
        ["a", "{'x':", [3], 3], ["d", [["n"]]], ["l", 5], [], 7, nested,
    ):  # fmt: skip
        for described in ([[[1, 2, 3, 0, 1], ["d", [["n", form]]]]], [[[1], form]], form):
            with pytest.raises(BrokenLine):
                unpack_samples(LANE, described, b"abc")


def test_samples_that_are_alike_come_as_they_went() -> None:
    samples = [
        Sample(
            Meta(REF._replace(record=number), number),
            {"tokens": np.arange(number, dtype="<u2"), "marks": np.ones(number, ">f8")[::1]},
        )
        for number in range(5)
    ]
    described, body = pack_samples(samples)
    assert described == {"count": 5, "alike": [["tokens", "<u2"], ["marks", ">f8"]]}
    whole = b"".join(body)
    got = unpack_samples(LANE, json.loads(json.dumps(described)), whole)
    assert repr(got) == repr(samples)
    assert all(each.values["tokens"].flags.writeable for each in got)
    for number, other in enumerate(
        [
            {"tokens": [1]},
            {"tokens": np.zeros(1)},
            {"tokens": np.zeros((1, 1), "<u2")},
            {},
            {"x": 1},
        ]
    ):
        mixed = [sample(tokens=np.zeros(1, "<u2")), sample(**other)]
        described, body = pack_samples(mixed)
        assert isinstance(described, list), number
        assert repr(unpack_samples(LANE, described, b"".join(body))) == repr(mixed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 2, "alike": [["tokens", "<u2"]]},
        {"count": 1 << 40, "alike": [["tokens", "<u2"]]},
        {"count": -1, "alike": [["tokens", "<u2"]]},
        {"count": "1", "alike": [["tokens", "<u2"]]},
        {"count": 1, "alike": [["tokens", "|O"]]},
        {"count": 1, "alike": [["tokens", "<u4"]]},
        {"count": 1, "alike": [["tokens"]]},
        {"count": 1, "alike": 7},
        {"count": 1},
        {},
    ],
)
def test_what_is_not_alike_is_refused(wrong: dict[str, Any]) -> None:
    _, body = pack_samples([sample(tokens=np.arange(3, dtype="<u2"))])
    with pytest.raises(BrokenLine):
        unpack_samples(LANE, wrong, b"".join(body))
    bad = struct.pack("<6q", 1, 2, 3, 0, 7, -3)
    with pytest.raises(BrokenLine):
        unpack_samples(LANE, {"count": 1, "alike": [["tokens", "<u2"]]}, bad)


class Ends:
    """A FrameSocket, and the bare socket and codec at its other end."""

    def __init__(self, silence: float = 0.2) -> None:
        left, self.sock = self.pair = self._pair()
        self.line = FrameSocket(left, Codec(KEY, server=True), silence=silence)
        self.codec = Codec(KEY, server=False)
        self.sock.sendall(self.codec.preface())
        self.line.greet()
        self.codec.feed(self.sock.recv(100))

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            left = socket.create_connection(server.getsockname())
            return left, server.accept()[0]

    def close(self) -> None:
        self.line.release()
        self.sock.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as ends:
        yield ends


HEADS: list[tuple[bytes, ...]] = [
    (b"{",), (b"[]",), (b'{"op":"x"}',), (b'{"body":-1}',), (b'{"body":true}',),
    (b'{"body":%d}' % (MOST_BODY + 1),), (b'{"body":2}', b"abc"), (b'{"body":2}', b""),
    (b"[" * 5000,),
]  # fmt: skip


@pytest.mark.parametrize("frames", HEADS)
def test_messages_that_are_not_ours_end_the_connection(
    ends: Ends, frames: tuple[bytes, ...]
) -> None:
    for frame in frames:
        ends.sock.sendall(ends.codec.seal(frame))
    with pytest.raises(BrokenLine, match=r"not understood|another size"):
        ends.line.receive()


def test_a_long_message_comes_whole_and_half_a_frame_does_not_wait_for_ever(ends: Ends) -> None:
    body = [b"a" * (3 * PIECE + 1), b"b", b"", b"c" * 5]
    sender = threading.Thread(target=lambda: ends.line.send({"op": "x"}, body))
    sender.start()
    got: list[bytes] = []
    while sum(map(len, got[1:])) < sum(map(len, body)):
        got += ends.codec.feed(ends.sock.recv(1 << 16))
    sender.join()
    assert b"".join(got[1:]) == b"".join(body) and max(map(len, got)) <= PIECE
    whole = ends.codec.seal(b'{"op":"y","body":0}')
    ends.sock.sendall(whole[:-1])
    began = time.monotonic()
    with pytest.raises(BrokenLine, match="no whole message"):
        ends.line.receive()
    assert time.monotonic() - began < 10
    with pytest.raises(CannotSend):
        ends.line.send({"op": "x" * (1 << 21)})


def test_another_key_or_plan_and_lanes_that_are_none_are_turned_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "RETRY", 0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()[:2]
    own = exchange_nodes.exchange(listener)
    plan = own._plan

    def peer(key: bytes = KEY, plan: str = plan) -> PeerLink:
        return PeerLink(*place, key, plan)

    strangers = [peer(key=b"x" * 32), peer(plan="another")]
    friend = peer()
    until(lambda: friend.up, "the connection")
    beside = open_lane(LANES[0])
    beside.seek(Position())
    got = friend.next(LANES[0], Position(), Position(), 1).result(60)
    assert got == [beside.next()]
    (taken,) = friend.take(LANES[0], [got[0][0].ref]).result(60)
    np.testing.assert_array_equal(
        taken.values["tokens"], beside.take([got[0][0].ref])[0].values["tokens"]
    )
    odd: list[Callable[[], Any]] = [
        lambda: friend.next(("nothing", 0), Position(), Position(), 1),
        lambda: friend.next(LANES[0], Position(-1), Position(), 1),
        lambda: friend.take(LANES[0], []),
        lambda: friend.take(LANES[0], [Ref(*LANES[0], -1, 0, 0)]),
    ]
    for ask in odd:
        until(lambda: friend.up, "the connection")
        with pytest.raises(link.NodeAway, match="broke"):
            ask().result(60)
    until(lambda: friend.up, "the connection")
    with pytest.raises(link.NodeAway, match=r"again|part|range"):
        friend.take(LANES[0], [Ref(*LANES[0], 0, 99, 0)]).result(60)
    assert friend.up, "a sample that is not there is no reason to leave"
    assert not any(each._up_once.is_set() for each in strangers)
    for each in (friend, *strangers):
        each.close()
    beside.close()
    own.close()
    listener.close()


def test_who_does_not_show_the_key_has_no_thread_and_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stranger had a thread; one thread too few ends nothing."""
    refused = refuse_once(monkeypatch, "data-node")
    listener = socket.create_server(("127.0.0.1", 0))
    own = exchange_nodes.exchange(listener)
    place = listener.getsockname()[:2]
    strangers = [socket.create_connection(place, 20) for _ in range(MOST + 8)]
    for each in strangers[:8]:
        while each.recv(100):
            pass
    assert not any(each.name == "data-node" for each in threading.enumerate())
    assert refused
    friend = PeerLink(*place, KEY, own._plan)
    until(lambda: friend.up, "the connection of one that has the key")
    assert not refused, "the first time, it got no thread"
    for each in (friend, own, listener, *strangers):
        each.close()


LISTS = [0] * 900


class Nested(ListedSource):
    """Records with a value that is told in JSON."""

    def read(self, part: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        for index, values in super().read(part, start):
            yield index, {**cast("dict[str, Any]", values), "lists": LISTS}


def test_samples_that_are_too_long_together_are_no_samples_that_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "SILENCE", 60.0)
    monkeypatch.setattr(wire, "PIECE", 1 << 12)  # a message has room for two such lists

    def open_nested(lane: tuple[str, int]) -> LocalFeed:
        made = Nested(source_of(lane[0]).records, window=WINDOW)
        return LocalFeed(SourceLane(made, *lane, 2, 7, WINDOW), ReadBudget(1 << 18))

    listener = socket.create_server(("127.0.0.1", 0))
    own = Exchange(open_nested, LANES, listener, KEY, PLAN, 1 << 20)
    peer = PeerLink(*listener.getsockname()[:2], KEY, own._plan)
    until(lambda: peer.up, "the connection")
    metas: list[Any] = []
    while len(metas) < 5:
        after = metas[-1][1] if metas else Position()
        metas += peer.next(LANES[0], after, Position(), 5 - len(metas)).result(60)
    wanted = [meta.ref for meta, _ in metas]
    found: list[Sample] = []
    while len(found) < len(wanted):
        found += peer.take(LANES[0], wanted[len(found) :]).result(60)
    assert [each.meta.ref for each in found] == wanted
    assert all(each.values["lists"] == LISTS for each in found)
    peer.close()
    own.close()
    listener.close()


def test_another_version_of_the_code_is_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may decode the same files to other samples."""
    sent: list[str] = []
    monkeypatch.setattr(joining, "Exchange", lambda *given: sent.append(given[4]) or MagicMock())
    monkeypatch.setattr(joining.socket, "socket", lambda fileno: None)
    plan = Plan({"web": MemorySource("web", [[3, 4]], lanes=1)})
    for code in ("its:plan 1", "its:plan 1", "its:plan 2"):
        one = joining.Joining((0, KEY.hex()))
        one.place(json.dumps([0, [["a", 1], ["b", 1], ["c", 1]]]))
        one.know(plan, code)
    assert sent[0] == sent[1] != sent[2]


@pytest.mark.parametrize("nodes_first", [True, False])
def test_an_exchange_that_cannot_be_made_is_told_once_and_not_to_ranks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], nodes_first: bool
) -> None:
    """A rank's connection would end, and be made again 20 times a second; and where the nodes
    were known before the plan, all ranks of the node got an error."""
    monkeypatch.setattr(joining, "Exchange", MagicMock(side_effect=RuntimeError("no new thread")))
    monkeypatch.setattr(joining.socket, "socket", lambda fileno: None)
    one = joining.Joining((0, KEY.hex()))
    nodes = json.dumps([0, [["a", 1], ["b", 1], ["c", 1]]])
    if nodes_first:
        one.place(nodes)
    one.know(plan := Plan({"web": MemorySource("web", [[3, 4]], lanes=1)}), "its:plan 1")
    for _ in range(2):
        one.place(nodes)
    assert one.feeds(plan).keys() == {("web", 0)}
    assert capfd.readouterr().err.count("not used by this one: no new thread") == 1


def test_a_frame_above_the_limit_is_refused_before_it_comes(ends: Ends) -> None:
    ends.sock.sendall(struct.pack(">I", 1 << 30) + bytes(16))
    with pytest.raises(BrokenLine, match="over the limit"):
        ends.line.receive()
