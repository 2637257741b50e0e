"""The messages in the code: the texts of its calls that print, and of the errors that it prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from lab.host import REPOSITORY

ROOMS = ("robust_slurm", "srun_wrapper", "standby", "status", "health", "prolog", "epilog")
# The calls whose text a user or a sysadmin reads: functions that print, and errors of bad input.
CHANNELS = frozenset(
    {"say", "_say", "_warn", "warn", "error", "_complain", "stderr", "CommandError", "UsageError"}
    | {"ConfigError", "CatalogueError", "CodeError", "CheckpointError", "StateError", "BadInput"}
    | {"StateDirError", "DurableError", "ListingError", "_Usage", "SizeError", "WishError"}
    | {"PoolError", "InstallError"}
)
STDERR = "stderr"  # print(…, file=sys.stderr)
_CALLED = re.compile(rf"\b(?:{'|'.join(CHANNELS)})\(|file=")
HOLE = "…"
# The name of the program before a message: it says nothing by itself.
_SPEAKER = re.compile(
    rf"^[{HOLE}\s]*(?:robust-(?!standby apply)[\w-]+(?: [\w{HOLE}-]+)?|[a-z_]+(?:\.[a-z_]+)+): "
    rf"|^\w+: {HOLE}$|^robust-[\w-]+(?: [\w-]+)?$"
)
_FEW = 8  # letters: below, a text says nothing by itself ("error: …")


class Text(NamedTuple):
    """One message: ``…`` stands for what is filled in."""

    channel: str
    text: str
    file: str


@cache
def texts() -> tuple[Text, ...]:
    """Return every message of the product once, in the order of the files."""
    found: dict[tuple[str, str], Text] = {}
    for room in ROOMS:
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            program = path.read_text(encoding="utf-8")
            if not _CALLED.search(program):
                continue
            for each in _of(ast.parse(program), path.relative_to(REPOSITORY).as_posix()):
                found.setdefault((each.channel, each.text), each)
    return tuple(found.values())


def _of(tree: ast.AST, file: str) -> Iterator[Text]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
        if name == "print" and any(word.arg == "file" for word in node.keywords):
            name = STDERR
        if name not in CHANNELS:
            continue
        for argument in node.args:
            for text in _texts(argument):
                text = re.sub(f"{HOLE}+", HOLE, text)
                said = _SPEAKER.sub("", text)
                if len(re.findall(r"[^\W\d_]", said)) >= _FEW and " " in text:
                    yield Text(name, text, file)


def _texts(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(_part(part) for part in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [(_texts(left) or [HOLE])[0] + (_texts(right) or [HOLE])[0]]
        case ast.IfExp(body=body, orelse=other):
            return [*_texts(body), *_texts(other)]
    return []


def _part(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else HOLE
