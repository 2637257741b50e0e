"""The mixture of a plan: each source gives tokens by its weight."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.data.errors import DataError
from robust_slurm.data.planning import mix


def drawn(weights: dict[str, float], amounts: dict[str, Any], draws: int) -> dict[str, int]:
    """Return what each source has given after so many draws of amounts by source."""
    names = sorted(weights)
    parts = mix.parts_of(weights, names, "mix")
    credits, given_ = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    for _ in range(draws):
        name = mix.choose(parts, credits)
        amount = amounts[name]()
        given_[name] += amount
        mix.book(parts, credits, name, amount)
    assert sum(credits.values()) == 0
    return given_


def test_sources_give_tokens_by_their_weights_whatever_their_samples_lengths() -> None:
    draw = random.Random(1)
    given_ = drawn(
        {"long": 0.5, "short": 0.3, "never": 0, "rare": 0.2},
        {
            "long": lambda: draw.randrange(1, 9000),
            "short": lambda: draw.randrange(1, 90),
            "rare": lambda: 7,
        },
        20_000,
    )
    total = sum(given_.values())
    assert given_["never"] == 0
    for name, weight in (("long", 0.5), ("short", 0.3), ("rare", 0.2)):
        assert abs(given_[name] - weight * total) <= 9000


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.001, 1e6), min_size=1))
def test_no_source_is_ever_more_than_a_sample_off(weights: dict[str, float]) -> None:
    names = sorted(weights)
    parts = mix.parts_of(weights, names, "mix")
    credits = dict.fromkeys(names, 0)
    for _ in range(100):
        mix.book(parts, credits, mix.choose(parts, credits), 1)
        assert max(map(abs, credits.values())) <= len(names) * sum(parts.values())


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (None, "is not a dict"),
        ({"x": 1}, "'x' is none of the sources"),
        ({"web": -1}, "the weight of 'web' is -1"),
        ({"web": math.nan}, "the weight of 'web' is nan"),
        ({"web": True}, "the weight of 'web' is True"),
        ({"web": "1"}, "the weight of 'web' is '1'"),
        ({"web": 0, "code": 0.0}, "no source has a weight above 0"),
        ({}, "no source has a weight above 0"),
    ],
)
def test_wrong_weights(weights: Any, why: str) -> None:
    with pytest.raises(DataError, match=f"mix.3.: .*{why}"):
        mix.parts_of(weights, ["code", "web"], "mix(3)")
