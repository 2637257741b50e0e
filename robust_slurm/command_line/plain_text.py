"""Output as the terminal, the locale and the reader can take it.

Much of what a command prints was written by others: users, nodes, other programs. So no control
character gets through but line ends and tabs (``text.shown``); what sets colours asks for
``styled``.

An ASCII locale (LC_ALL=C, LANG=C) gets letters of ASCII instead of bytes that it cannot show;
NO_COLOR and TERM=dumb get no colours.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from typing import IO, Any, cast

from robust_slurm.text import shown

_HANDLER = "robust-plain"
_ASCII = {
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{EN DASH}": "-",
    "\N{EM DASH}": "-",
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{LEFTWARDS ARROW}": "<-",
    "\N{LEFT RIGHT ARROW}": "<->",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{LESS-THAN OR EQUAL TO}": "<=",
    "\N{GREATER-THAN OR EQUAL TO}": ">=",
    "\N{PLUS-MINUS SIGN}": "+-",
    "\N{ALMOST EQUAL TO}": "~",
    "\N{MIDDLE DOT}": ".",
    "\N{BULLET}": "*",
    "\N{MICRO SIGN}": "u",
    "\N{GREEK SMALL LETTER MU}": "u",
    "\N{DEGREE SIGN}": " deg",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{FULL BLOCK}": "#",
    "\N{BOX DRAWINGS LIGHT HORIZONTAL}": "-",
    "\N{BOX DRAWINGS HEAVY HORIZONTAL}": "-",
    "\N{BOX DRAWINGS LIGHT VERTICAL}": "|",
}


class OutputError(Exception):
    """The output cannot be written; ``reader_gone``: because what read it has ended."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.reader_gone = isinstance(error, BrokenPipeError)


class Output:
    """A stream whose failing writes raise OutputError, and no OSError that a command handles.

    ``own``: its escape sequences are ours, and what others wrote is clean already.
    """

    def __init__(self, stream: IO[str], *, own: bool = False) -> None:
        self._stream = stream
        self._own = own

    def styled(self) -> Output:
        """Return the same stream for text with escape sequences of ours."""
        return Output(self._stream, own=True)

    def write(self, text: str) -> int:
        """Write; OutputError."""
        try:
            return self._stream.write(text if self._own else shown(text))
        except OSError as err:
            raise OutputError(err) from err

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each; OutputError."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush; OutputError."""
        try:
            self._stream.flush()
        except OSError as err:
            raise OutputError(err) from err

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def output(stream: IO[str] | None) -> IO[str]:
    """Return ``stream`` with failing writes made recognizable; None (closed): what drops all."""
    if stream is None:
        stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end
    return stream if isinstance(stream, Output) else cast("IO[str]", Output(stream))


def styled(stream: IO[str]) -> IO[str]:
    """Return the stream for text with escape sequences of ours, in which all that others wrote is
    clean (``text.one_line``, ``text.shown``)."""
    return cast("IO[str]", stream.styled()) if isinstance(stream, Output) else stream


def abandon(stream: IO[str]) -> None:
    """Discard what is left in the buffer: Python tries to write it once more when it ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except (OSError, ValueError, AttributeError):  # no file behind it
        pass


def fit_locale() -> None:
    """Have stdout and stderr print what the locale can show, whatever the text is."""
    codecs.register_error(_HANDLER, transliterate)
    plain = is_ascii(os.environ)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="ascii" if plain else None, errors=_HANDLER)


def is_ascii(env: Mapping[str, str]) -> bool:
    """Return whether the user has set the locale to C or POSIX.

    Python runs such a locale in UTF-8, and sets LC_CTYPE=C.UTF-8 itself where LANG says C.
    """
    if env.get("LC_ALL"):
        return env["LC_ALL"] in ("C", "POSIX")
    if env.get("LC_CTYPE", "") not in ("", "C.UTF-8"):
        return env["LC_CTYPE"] in ("C", "POSIX")
    return env.get("LANG", "") in ("C", "POSIX")


def transliterate(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for what an encoding lacks (an error handler of ``codecs``)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return plain(error.object[error.start : error.end]), error.end


def plain(text: str) -> str:
    """Return the text in ASCII: its sign, its letter without accents, or "?"."""
    return "".join(_ASCII.get(c) or _letter(c) for c in text)


def _letter(char: str) -> str:
    return unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode() or "?"


def encoded(text: str) -> bytes:
    """Return the bytes of a line for stderr, as the terminal and the locale can show it."""
    text = shown(text)
    if not text.isascii() and is_ascii(os.environ):
        text = plain(text)
    return text.encode(errors="backslashreplace")


def has_colour(stream: Any, env: Mapping[str, str] | None = None) -> bool:
    """Return whether to print colours: on a terminal that has them, unless NO_COLOR is set."""
    env = os.environ if env is None else env
    return bool(stream.isatty()) and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
