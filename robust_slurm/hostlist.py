"""Host lists as Slurm writes them: "n[1-4,7],login", "r[1-2]n[01-16]-ib". Pure.

As src/common/hostlist.c of a cluster with one dimension: any number of brackets, text after them,
numbers with as many digits as the low end of their range was written with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

EXPAND_LIMIT = 65536  # names of one expression

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")


def contains(expression: str, node: str) -> bool:
    """True if a host list ("n[1-4,7],login", "r[1-2]n[01-16]-ib") names the node.

    Raises ValueError for what is no host list.
    """
    tokens = [_parts(token) for token in split(expression)]  # all, so that no error hides
    return any(_matches(parts, node) for parts in tokens)


def expand(expression: str) -> list[str]:
    """Every name of a host list, in its order. Raises ValueError, also beyond EXPAND_LIMIT."""
    out: list[str] = []
    for token in split(expression):
        names = [""]
        for part in _parts(token):
            if isinstance(part, str):
                names = [name + part for name in names]
                continue
            size = sum(high - low + 1 for low, high, _ in part)
            if size * len(names) + len(out) > EXPAND_LIMIT:
                raise ValueError(f"{expression[:80]!r} names more than {EXPAND_LIMIT} hosts")
            names = [
                f"{name}{number:0{width}d}"
                for name in names
                for low, high, width in part
                for number in range(low, high + 1)
            ]
        out += names
    return out


_Ranges = list[tuple[int, int, int]]  # low, high, digits of low as written


def split(expression: str) -> Iterator[str]:
    """The items between commas and blanks outside of brackets."""
    start = depth = 0
    for at, char in enumerate(expression):
        if char in "[(":
            depth += 1
        elif char in "])":
            depth -= 1
        elif depth == 0 and char in ", \t\n\r":
            if at > start:
                yield expression[start:at]
            start = at + 1
    if start < len(expression):
        yield expression[start:]


def _parts(token: str) -> list[str | _Ranges]:
    """A token as literals and groups of ranges."""
    out: list[str | _Ranges] = []
    at = 0
    for group in _GROUP.finditer(token):
        out += [token[at : group.start()], [_range(text) for text in group[1].split(",")]]
        at = group.end()
    out.append(token[at:])
    if any(isinstance(part, str) and ("[" in part or "]" in part) for part in out):
        raise ValueError(f"brackets do not match in {token[:80]!r}")
    return [part for part in out if part]


def _range(text: str) -> tuple[int, int, int]:
    match = _RANGE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text[:40]!r} is no range of numbers")
    low, high = int(match[1]), int(match[2] or match[1])
    if low > high:
        raise ValueError(f"{text[:40]!r} runs backwards")
    return low, high, len(match[1])


def _matches(parts: list[str | _Ranges], name: str) -> bool:
    if not parts:
        return not name
    head, rest = parts[0], parts[1:]
    if isinstance(head, str):
        return name.startswith(head) and _matches(rest, name[len(head) :])
    length = 0
    while length < len(name) and length < 20 and "0" <= name[length] <= "9":
        length += 1
        digits = name[:length]
        number = int(digits)
        fits = any(low <= number <= high and digits == f"{number:0{w}d}" for low, high, w in head)
        if fits and _matches(rest, name[length:]):
            return True
    return False
