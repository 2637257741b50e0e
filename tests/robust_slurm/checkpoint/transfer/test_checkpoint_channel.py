"""The wire between two stores: frames, messages, and peers that break its rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_pairs import greeted, in_thread, offer_of, pair, send

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.transfer.channel import BrokenError, number_list, numbers
from robust_slurm.checkpoint.transfer.sending import Offer


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "CHUNK", 1000)


def test_a_peer_without_the_key_gets_nothing_and_says_nothing() -> None:
    a, b = greeted(other=b"x" * 32)
    a.send({"op": "pull", "owner": 0, "step": 1})
    with pytest.raises(BrokenError, match="not authentic"):
        b.receive()


def test_a_silent_peer_is_left_after_its_time() -> None:
    _, b = pair(idle=0.2)
    with pytest.raises(BrokenError):
        b.greet()


def test_close_wakes_a_thread_that_waits_for_ever() -> None:
    _, b = greeted()
    thread, result = in_thread(lambda: b.receive(forever=True))
    b.close()
    thread.join(10)
    assert isinstance(result[0], BrokenError)


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b'{"op":1}', b"\xff", b"[" * 5000])
def test_an_authentic_frame_that_is_no_message_breaks_the_connection(payload: bytes) -> None:
    a, b = greeted()
    a._send(a._codec.seal(payload))
    with pytest.raises(BrokenError, match="not understood"):
        b.receive()


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_garbage_from_a_stranger_never_gets_through(garbage: bytes) -> None:
    a, b = pair(idle=5.0)
    a._sock.sendall(garbage)
    a.close()
    with pytest.raises(BrokenError):
        b.greet()
        b.receive()
    a.release()
    b.release()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["owner", "step", "world", "epoch", "size", "digest",
                                        "needs", "marks"]), _JSON))  # fmt: skip
def test_an_odd_offer_is_refused_or_consistent(fields: dict[str, Any]) -> None:
    try:
        offer = Offer.read({"op": "offer", **fields})
    except BrokenError:
        return
    assert len(offer.digest) == digest.count(offer.size)
    assert offer.size > 8


def test_a_good_offer_survives_the_way() -> None:
    offer = Offer(3, 7, 4, (0, 3), 2, 2500, [1, 2, 0xFFFFFFFF], marks=(7, 8, 9))
    back = Offer.read({**offer.message("offer"), "needs": list(offer.needs), "marks": [7, 8, 9]})
    assert back == offer


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None, 1 << 62])
def test_numbers_are_numbers(value: Any) -> None:
    with pytest.raises(BrokenError):
        numbers({"op": "x", "n": value}, "n")
    with pytest.raises(BrokenError):
        number_list({"op": "x", "n": [value]}, "n", 5, 10)


@pytest.mark.parametrize("chunks", [[9], [0, 0, 0, 0, 0, 0], "all", [-1]])
def test_a_receiver_that_asks_for_odd_chunks_is_left(tmp_path: Path, chunks: Any) -> None:
    a, b = greeted(idle=1.0)
    fd, offer, _ = offer_of(tmp_path, 5000)
    in_thread(lambda: (b.receive(), b.send({"op": "go", "chunks": chunks})))
    with pytest.raises(BrokenError):
        send(a, fd, offer)
