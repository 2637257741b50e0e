"""The one place that all warnings of a Checkpointer go through."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator

NUMBER = re.compile(r"\d+")  # of steps, slots and bytes: the trouble is the same


class StrictError(RuntimeError):
    """A warning of ``Checkpointer(strict=True)``, raised instead of printed."""


class CheckpointWarnings:
    """Reports each kind of trouble once; or, ``strict``, raises it where the script can see it.

    A warning may be due in any thread, in a hook, or in the midst of work that other ranks take
    part in. So nothing is raised on the spot: ``raising`` raises at the end of the script's call.
    """

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._said: set[str] = set()
        self._due: list[str] = []
        self.write: Callable[[str], None] = to_stderr
        """Prints a warning, and reports it to whoever else must know."""

    def say(self, text: str) -> None:
        """Warn, once for each kind of text. From any thread; raises nothing."""
        kind = NUMBER.sub("#", text)
        if kind in self._said:
            return
        self._said.add(kind)
        if self._strict:
            self._due.append(text)
        else:
            self.write(text)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Run one call of the script. Raises StrictError at its end if a warning is due.

        If the call itself raises, its error goes on and the warnings are printed.
        """
        try:
            yield
        except BaseException:
            self.print_due()
            raise
        if self._due:
            due, self._due = self._due, []
            raise StrictError("\n".join(due))

    def print_due(self) -> None:
        """Print what can no longer be raised."""
        due, self._due = self._due, []
        for text in due:
            self.write(text)


def to_stderr(text: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no usable stderr
        sys.stderr.write(f"robust-slurm: {text}\n")
