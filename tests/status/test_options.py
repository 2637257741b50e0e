"""Options of robust-status that go together, and the times that it takes."""

from __future__ import annotations

import argparse

import pytest

from status.options import build_parser, contradiction, since


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", ""),
        ("--bad --mine --since 2h --watch", ""),
        ("118 --why --json", ""),
        ("118 --accounts --weekly --csv", ""),
        ("--accounts --since 4w --mine", ""),
        ("--demo 118 --html x", ""),
        ("118 --watch 3", ""),
        ("118 --lemons", "JOB|NODE and --lemons do not go together"),
        ("--nodes --bad", "--nodes and --bad do not go together"),
        ("118 --why --html x", "--why and --html do not go together"),
        ("--why", "--why needs a job id"),
        ("n1 --html x", "--html needs a job id"),
        ("n1 --accounts", "--accounts is of jobs"),
        ("--csv", "--csv needs --accounts"),
        ("--weekly", "--weekly needs --accounts"),
        ("--accounts --csv --json", "--csv and --json do not go together"),
        ("--format exclude", "--format needs --lemons"),
        ("--demo --state-dir x", "--demo shows records of its own"),
        ("--demo --diagnose x", "--demo shows records of its own"),
        ("--watch 5 --json", "--watch and --json do not go together"),
        ("--watch 5 --metrics x", "--watch and --metrics do not go together"),
        ("--lemons --since 2h", "--since and --lemons do not go together"),
        ("118 --why --since 2h", "--since and --why do not go together"),
        ("118 --mine", "--mine and JOB|NODE do not go together"),
        ("--signatures x", "--signatures needs --diagnose"),
        ("-M other", "-M: shows the cluster of this host only"),
    ],
)
def test_options_that_go_together(words: str, why: str) -> None:
    said = contradiction(build_parser().parse_args(words.split()))
    assert said.startswith(why) and bool(said) is bool(why)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("90s", -90.0),
        ("30min", -1800.0),
        ("12h", -43200.0),
        ("7d", -604800.0),
        ("1.5w", -907200.0),
        ("1970-01-02T00:00+00:00", 86400.0),
        *((bad, None) for bad in ("", "h", "-3d", "3 d", "3m", "yesterday", "9" * 30 + "d")),
    ],
)
def test_since(text: str, value: float | None) -> None:
    if value is not None:
        assert since(text) == value
    else:
        with pytest.raises(argparse.ArgumentTypeError, match="not a time"):
            since(text)
