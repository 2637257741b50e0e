"""The cleaner of text that others wrote: users, programs, devices. Python 3.9 syntax."""

from __future__ import annotations

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
