"""Attacks on the wire, by words and on the web page, as bench.attacks runs them."""

from __future__ import annotations

import os

import pytest

from bench.attacks.__main__ import attempt
from bench.attacks.attack import Got
from bench.attacks.cases import ATTACKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="it plays the root plane"),
]


@pytest.mark.parametrize(
    "name",
    [
        "agent_name_taken",
        "sockets_idle",
        "web_crowd",
        "web_markup",
        "web_new_jobs",
        "web_stale_jobs",
        "wire_downgrade",
        "wire_reflection",
        "wire_replay",
        "words_escapes_in_records",
        "words_escapes_in_replies",
        "words_many_rosters",
    ],
)
def test_the_attack_gets_nothing(name: str) -> None:
    got = attempt(ATTACKS[name], None)
    assert isinstance(got, Got), got
    assert not got.succeeded, got.what
