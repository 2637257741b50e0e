"""The attacks on what root runs and on the stubs get nothing."""

from __future__ import annotations

import os

import pytest

from bench.attacks.__main__ import attempt
from bench.attacks.attack import Attack, Got
from bench.attacks.cases import stub, trust

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="plays the root plane"),
]


@pytest.mark.parametrize("attack", [*trust.ATTACKS, *stub.ATTACKS], ids=lambda each: each.name)
def test_an_attack_gets_nothing(attack: Attack) -> None:
    got = attempt(attack, None)
    assert isinstance(got, Got), got
    if attack.name != "stub_vanishes":  # there a real fault is drained, with its own reason
        assert not got.drained, got.what
    assert not got.succeeded and not got.silent, got.what
