"""The sample outputs in docs/robust-status.md are what robust-status --demo prints."""

from __future__ import annotations

import io
import re
import shlex

import pytest
from places import REPOSITORY
from status_records import NOW

from status.cli import _answer
from status.options import build_parser, contradiction
from status.source import demo

PAGE = REPOSITORY / "docs" / "robust-status.md"
BLOCK = re.compile(r"```\n\$ (robust-status --demo[^\n]*)\n(.*?)```\n", re.DOTALL)
SAMPLES = BLOCK.findall(PAGE.read_text(encoding="utf-8"))


class Terminal(io.StringIO):
    """A terminal of 100 columns and 40 lines, without colours."""

    def isatty(self) -> bool:
        return True


def printed(words: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in (("TERM", "dumb"), ("COLUMNS", "100"), ("LINES", "40"), ("TZ", "UTC")):
        monkeypatch.setenv(name, value)
    args = build_parser().parse_args(shlex.split(words)[1:])
    assert contradiction(args) == ""
    out = Terminal()
    with demo(NOW) as source:
        _answer(args, source, out)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize(("words", "text"), SAMPLES, ids=[words for words, _ in SAMPLES])
def test_a_sample(words: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line "…" stands for all that follows."""
    said = printed(words, monkeypatch)
    if text.endswith("…\n"):
        assert said.startswith(text.removesuffix("…\n"))
    else:
        assert said == text


def test_there_are_samples() -> None:
    assert len(SAMPLES) >= 5
