"""Text of users and nodes reaches a terminal without control characters, whatever prints it."""

from __future__ import annotations

import io
import json

import pytest
from rich.text import Text

from health.admin.flow import HERE
from health.admin.flow import run as carry_out
from health.admin.node import AdminReply, AdminRequest
from health.admin.remote import read_reply
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.plain_text import encoded, output, styled
from robust_slurm.command_line.run import run
from robust_slurm.command_line.screen import console, plain_table
from robust_slurm.text import shown
from status.views.watch import watch

ESC = "\x1b]0;owned\x07\x1b[2J\x9b1m\x1b[8mhidden\x00\u202eevil\r"
HURTFUL = ("\x1b", "\x07", "\x9b", "\x00", "\u202e", "\r", "\b")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def clean(text: str) -> bool:
    return not any(char in text for char in HURTFUL)


def test_lines_and_tabs_stay() -> None:
    assert shown("a\tb\nc\u00e9\n") == "a\tb\nc\u00e9\n"
    assert clean(shown(ESC)) and shown(ESC).endswith("?evil ")


def test_a_command_prints_no_control_character() -> None:
    out = Terminal()

    def body(_args: object, to: object) -> int:
        print(f"by print {ESC}")  # redirected
        to.write(f"by write {ESC}\n")  # type: ignore[attr-defined]
        to.writelines([f"by lines {ESC}\n"])  # type: ignore[attr-defined]
        return 0

    assert run(Parser(prog="x", description="x"), [], body, out) == 0
    assert clean(out.getvalue()) and out.getvalue().count("hidden") == 3


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_console_keeps_its_colours_and_nobody_elses(wrapped: bool) -> None:
    raw = Terminal()
    to = console(output(raw) if wrapped else raw)
    table = plain_table("name")
    table.add_row(ESC)
    to.print(f"x {ESC}")
    to.print(Text(ESC))
    to.print(table)
    assert clean(raw.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", ""))
    assert raw.getvalue().count("hidden") == 3


def test_a_page_that_is_shown_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    raw = Terminal()

    def show(to: object) -> int:
        to.write(f"a {ESC}\n")  # type: ignore[attr-defined]
        return 0

    def stop(_seconds: float) -> None:
        raise KeyboardInterrupt

    watch(show, 1.0, output(raw), stop)
    own = raw.getvalue().replace("\x1b[2J", "").replace("\x1b[H", "")
    assert clean(own.replace("\x1b[K", "").replace("\x1b[J", "")) and "hidden" in own


def test_a_line_of_robust_srun() -> None:
    assert clean(encoded(f"robust-srun: {ESC}\n").decode())
    assert styled(io.StringIO()).write("x") == 1


def test_a_nodes_reply_is_text() -> None:
    """A node's reply reached the administrator's terminal with its escapes."""
    said = {"error": f"a\nn2  same {ESC}", "notes": [ESC, "x\ny"], "identity": ESC,
            "changes": [["create", f"/x{ESC}", f"+a\n+{ESC}\n"]]}  # fmt: skip
    reply = read_reply(json.dumps(said))
    out = io.StringIO()
    request = AdminRequest("install", "/etc")
    carry_out({"n1": request}, lambda _: {"n1": reply}, {}, yes=True, dry_run=True, out=out)
    assert clean(out.getvalue()) and "hidden" in out.getvalue()
    assert not any(line.startswith("n2") for line in out.getvalue().splitlines())
    assert HERE == ""


@pytest.mark.parametrize(
    "text", ["[]", "{", "5", '{"changes":5}', '{"changes":[["a"]]}', '{"other":1}', "[" * 100_000]
)
def test_what_is_no_reply_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        read_reply(text)
    assert read_reply("{}") == AdminReply(changes=[], notes=[])
