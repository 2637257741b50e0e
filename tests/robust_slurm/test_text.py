"""Text of others, as one printable line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.text import ago, how_ended, one_line, signal_name, span


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("as it is", "as it is"),
        ("two\n  lines\tand\r\nmore ", "two lines and more"),
        ("a\x1b[31mb\0c", "a?[31mb?c"),
        ("\u202egnp.exe", "?gnp.exe"),
        ("a\udce9b", "a?b"),  # a byte that is no UTF-8
        ("x" * 12, "x" * 9 + "…"),
        ("x" * 10, "x" * 10),
        ("", ""),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text, 10 if "x" in text else 100) == line


@given(st.text(), st.integers(1, 50))
def test_any_text(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert line.isprintable() and len(line) <= limit and one_line(line, limit) == line


def test_a_time_has_the_unit_that_fits() -> None:
    told = [span(s) for s in (-1, 5, 90, 600, 9000, 108_000, 200_000)]
    assert told == ["0 s", "5 s", "90 s", "10 min", "2 h", "30 h", "2 d"]
    assert ago(100.0, 340.0) == "4 min ago"


def test_signal_names() -> None:
    assert [signal_name(s) for s in (9, 15, 300)] == ["SIGKILL", "SIGTERM", "signal 300"]


def test_the_words_for_an_end() -> None:
    assert [how_ended(code) for code in (0, 3, -9, -36)] == [
        "ended with exit code 0",
        "ended with exit code 3",
        "was killed by SIGKILL",
        "was killed by signal 36",
    ]
