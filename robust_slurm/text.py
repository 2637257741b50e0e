"""Text for people: clean what others wrote, form plurals, name signals, suggest known words.

Python 3.9 syntax.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

LIMIT = 600  # characters


def one_line(text: str, limit: int = LIMIT) -> str:
    """Return the text as one printable line of at most ``limit`` characters.

    Each run of blanks and line ends becomes one blank, each other character that does not print
    (control characters, escapes, marks that turn the direction of writing) a "?". Text that was
    cut ends in "…".
    """
    words = " ".join(text[: 4 * limit].split())
    clean = words if words.isprintable() else "".join(c if c.isprintable() else "?" for c in words)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def shown(text: str) -> str:
    """Return lines of text as a terminal may get them: line ends and tabs stay, other blanks become
    blanks, and each other character that does not print (see ``one_line``) a "?"."""
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or c.isprintable() else " " if c.isspace() else "?" for c in text
    )


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 node" or "2 nodes"; ``many``: the plural that is not ``one`` with an s."""
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def span(seconds: float) -> str:
    """Return a time in the unit that fits: "90 s", "10 min", "30 h", "3 d"."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def ago(then: float, now: float) -> str:
    """Return "4 min ago"."""
    return f"{span(now - then)} ago"


def signal_name(number: int) -> str:
    """Return "SIGTERM", or "signal 36" for a real-time signal, which Python has no name for."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how_ended(code: int) -> str:
    """Return words for an exit code; negative: that of a signal."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def listed(words: Iterable[str], joined: str = "or") -> str:
    """Return "a, b or c"."""
    names = list(words)
    return f" {joined} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that was most likely meant, or ""."""
    import difflib

    by_bare = {_bare(name): name for name in known}
    bare = _bare(word)
    begun = [name for name in by_bare if len(bare) > 1 and name.startswith(bare)]
    found = sorted(begun, key=len) or difflib.get_close_matches(bare, by_bare, 1)
    return by_bare[found[0]] if found else ""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "; did you mean …?", or ``otherwise``."""
    found = closest(word, known)
    return f"; did you mean {found}?" if found else otherwise


def _bare(word: str) -> str:
    return word.lower().lstrip("-").replace("_", "-")
