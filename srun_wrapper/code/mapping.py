"""A rank's command, working directory and PYTHONPATH in terms of a snapshot (pure).

What is inside the source directory and in the snapshot is taken from there. Everything else,
what git ignores among it, stays where it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import normpath
from pathlib import PurePath

Exists = Callable[[str], bool]
_NAME = re.compile(r"-.*|[\w.+~@]+", re.DOTALL)


@dataclass(frozen=True)
class Mapping:
    """A map of ``source`` to ``tree``; ``old`` is the working directory that a rank would have.

    All are absolute. ``has`` is true for a path, relative to the source, that the snapshot holds a
    copy of; ``exists`` for an absolute path outside it; ``real`` resolves the links of a path.
    """

    source: str
    tree: str
    old: str
    has: Exists
    exists: Exists
    real: Callable[[str], str]

    def directory(self) -> str:
        """Return the rank's working directory; "": unchanged."""
        inside = self._inside(self.old)
        if inside is None or not self.has(inside):
            return ""
        return self._in_tree(inside)

    def command(self, words: Sequence[str]) -> tuple[str, ...]:
        """Map the program if it is a path, and every argument that names a path."""
        first = self._path(words[0]) if "/" in words[0] else words[0]
        return (first, *map(self._argument, words[1:]))

    def python_path(self, value: str) -> str:
        """Map the entries of PYTHONPATH; relative ones become absolute."""
        entries = []
        for entry in value.split(os.pathsep) if value else ():
            path = normpath(PurePath(self.old, entry))
            inside = self._inside(path)
            known = inside is not None and self.has(inside)
            entries.append(self._in_tree(inside or ".") if known else path)
        return os.pathsep.join(entries)

    def _argument(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if value and _NAME.fullmatch(name):  # --name=value, name=value
            return name + equals + self._path(value)
        return word if word.startswith("-") else self._path(word)

    def _path(self, word: str) -> str:
        path = normpath(PurePath(self.old, word))
        inside = self._inside(path)
        moved = self.directory() != ""
        if inside is None:  # "../data" means another place in another working directory
            return path if moved and not word.startswith("/") and self.exists(path) else word
        if not self.has(inside) or (moved and not word.startswith("/")):
            return word
        return self._in_tree(inside)

    def _inside(self, path: str) -> str | None:
        """Return the path relative to the source, "." for itself; None outside."""
        for each in (normpath(path), self.real(path)):
            if each == self.source:
                return "."
            if each.startswith(self.source + "/"):
                return each.removeprefix(self.source + "/")
        return None

    def _in_tree(self, inside: str) -> str:
        return normpath(PurePath(self.tree, inside))
