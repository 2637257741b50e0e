"""Attacks on the drains, run as bench.attacks runs them."""

from __future__ import annotations

import os

import pytest

from bench.attacks.__main__ import attempt
from bench.attacks.attack import Got
from bench.attacks.cases.drains import ATTACKS


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="plays root and a user")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: str(attack.name))
def test_no_user_has_a_healthy_node_drained(attack: object) -> None:
    got = attempt(attack, None)  # type: ignore[arg-type]
    assert isinstance(got, Got), got
    assert not got.succeeded and not got.drained, got.what
