"""Output that nobody reads, that is full, or in an ASCII locale; progress; unknown variables."""

from __future__ import annotations

import ast
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import REPOSITORY
from waiting import until

from robust_slurm.command_line import plain_text
from robust_slurm.command_line.errors import warn
from robust_slurm.command_line.progress import ProgressBar
from robust_slurm.config import FIELDS, OWN_VARIABLES, unknown_variables

BIN = Path(sys.executable).parent
NEVER = ("Traceback", "Exception ignored", "UnicodeEncodeError")

installed = pytest.mark.skipif(
    not (BIN / "robust-health").exists(), reason="the commands are not installed"
)


def shell(line: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "ROBUST_"))}
    kept |= {"PATH": f"{BIN}:{os.environ['PATH']}", **env}
    words = ["bash", "-c", f"set -o pipefail; {line}"]
    return subprocess.run(words, env=kept, capture_output=True, timeout=60)


@installed
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("robust-health list | true", 0, ""),
        ("robust-health list > /dev/full", 1, "the output cannot be written: No space left"),
        ("robust-health list >&-", 0, ""),
        ("robust-health explain qqqq 2>&-", 2, ""),
        ("robust-health explain qqqq --json > /dev/full", 1, "the output cannot be written"),
        ("robust-ckpt --help > /dev/full", 1, "the output cannot be written: No space left"),
        ("robust-standby size --nodes 9 --rate 1 | true", 0, ""),
        ("robust-standby size --nodes 9 --rate 1 > /dev/full", 1, "the output cannot be written"),
        ("robust-srun --robust-help | true", 0, ""),
        ("robust-srun --robust-help > /dev/full", 1, "the output cannot be written"),
        ("robust-update --version > /dev/full", 1, "the output cannot be written"),
        ("robust-prolog --help | true", 0, ""),
    ],
)
def test_output_that_cannot_be_written(line: str, code: int, said: str) -> None:
    done = shell(line)
    err = done.stderr.decode()
    assert done.returncode == code and said in err, (done.returncode, err)
    assert bool(err) is bool(said) and not any(word in err for word in NEVER)


@installed
@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("robust-standby size --nodes 100 --rate 1; robust-standby --nöpe x", {"LC_ALL": "C"}),
        ("robust-srun --robust-sparés=1 x", {"LANG": "C"}),
        ("robust-health explain xid 79", {"LC_ALL": "POSIX"}),
    ],
)
def test_an_ascii_locale_gets_ascii(line: str, env: dict[str, str]) -> None:
    done = shell(line, **env)
    said = done.stdout + done.stderr
    assert said and said.isascii() and not any(word in said.decode() for word in NEVER)


@pytest.mark.parametrize(
    ("env", "ascii_"),
    [
        ({}, False),
        ({"LC_ALL": "C"}, True),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, False),
        ({"LANG": "POSIX", "LC_CTYPE": "C.UTF-8"}, True),  # LC_CTYPE: by Python itself
        ({"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, False),
        ({"LANG": "en_US.UTF-8"}, False),
    ],
)
def test_the_locale_that_counts(env: dict[str, str], ascii_: bool) -> None:
    assert plain_text.is_ascii(env) is ascii_


def test_signs_and_letters_have_ascii_forms() -> None:
    assert plain_text.plain("a … 3 \N{MULTIPLICATION SIGN} 2 → ü 日") == "a ... 3 x 2 -> u ?"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("env", "colour"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colours(env: dict[str, str], colour: bool) -> None:
    assert plain_text.has_colour(Terminal(), env) is colour
    assert not plain_text.has_colour(io.StringIO(), env)


def test_a_bar_makes_room_for_lines_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar("verifying", 4e9, "B", after=0.0) as progress:
        progress.add(1e9)
        until(lambda: "25%  1 GB of 4 GB" in terminal.getvalue(), "the bar")
        warn("robust-ckpt", "a file is damaged")
    text = terminal.getvalue()
    assert "verifying [######------------------]" in text
    assert "\r\x1b[Krobust-ckpt: a file is damaged\n" in text and text.endswith("\r\x1b[K")


@pytest.mark.parametrize("term", ["dumb", "", "xterm"])
def test_no_bar_without_a_terminal_or_before_two_seconds(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    stream = Terminal() if term != "xterm" else io.StringIO()
    with ProgressBar("asking", 10, "nodes", after=0.0, stream=stream) as progress:
        progress.add(1)
    assert " 10%  1 of 10 nodes, " in progress.text()
    monkeypatch.setenv("TERM", "xterm")
    quick = Terminal()
    with ProgressBar("verifying", 10, stream=quick):
        pass
    assert stream.getvalue() == quick.getvalue() == ""


@installed
def test_a_terminal_shows_no_bar_for_a_short_command() -> None:
    """The whole way, with a real terminal as stderr."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [BIN / "robust-ckpt", "verify", "/nowhere"], stderr=theirs, timeout=60
        )
        os.close(theirs)
        assert done.returncode == 2 and b"/nowhere is not a directory" in os.read(ours, 4096)
    finally:
        os.close(ours)


def test_variables_that_match_no_setting_are_reported() -> None:
    ours = dict.fromkeys(OWN_VARIABLES, "1") | {"ROBUST_TEST_NODE": "n1", "PATH": "/bin"}
    ours |= {"ROBUST_" + name.upper(): "1" for name in FIELDS}
    assert unknown_variables(ours) == []
    ignored = "is ignored: there is no such setting"
    assert unknown_variables({"ROBUST_SPARE": "1", "ROBUST_QQQQ": "1"}) == [
        f"environment ROBUST_QQQQ {ignored}",
        f"environment ROBUST_SPARE {ignored}; did you mean ROBUST_SPARES?",
    ]


def test_each_variable_of_ours_is_listed() -> None:
    """A variable that a program of ours sets must not be reported to users as unknown."""
    named = {
        node.value
        for room in ("robust_slurm", "srun_wrapper", "health", "standby", "status", "prolog")
        for path in (REPOSITORY / room).rglob("*.py")
        if b"ROBUST_" in (text := path.read_bytes())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"ROBUST_[A-Z_]+[A-Z]", node.value)
        if "CHANNEL" not in node.value  # names of NVIDIA's
    }
    assert len(named) > 20 and unknown_variables(dict.fromkeys(named, "1")) == []
