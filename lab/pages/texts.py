"""The messages in the code: the texts of its calls that print, and of the errors that it prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from lab.host import REPOSITORY

ROOMS = ("robust_slurm", "srun_wrapper", "standby", "status", "health", "prolog", "epilog")
# The calls whose text a user or a sysadmin reads: functions that print, and errors of bad input.
CHANNELS = frozenset(
    {"say", "_say", "_warn", "warn", "error", "_complain", "stderr", "CommandError", "UsageError"}
    | {"ConfigError", "CatalogueError", "CodeError", "CheckpointError", "StateError", "BadInput"}
    | {
        "StateDirError",
        "DurableError",
        "ListingError",
        "NoRecordError",
        "_usage",
        "_Wrong",
        "SizeError",
        "WishError",
    }
    | {"PoolError", "InstallError", "DataError", "SourceStalled"}
)
STDERR = "stderr"  # print(…, file=sys.stderr)
_CALLED = re.compile(rf"\b(?:{'|'.join(CHANNELS)})\(|file=|interrupted=")
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
    for scope in _scopes(tree):
        nodes = list(_within(scope))
        named = _assigned(nodes)
        for node in nodes:
            if isinstance(node, ast.Call):
                yield from _said(node, named, file)


def _said(node: ast.Call, named: dict[str, list[str]], file: str) -> Iterator[Text]:
    name = str(getattr(node.func, "id", "") or getattr(node.func, "attr", ""))
    words = {word.arg: word.value for word in node.keywords}
    if name == "print" and "file" in words:
        name = STDERR
    # The message for Ctrl-C is a keyword of the call that runs a command.
    arguments = [*node.args] if name in CHANNELS else []
    arguments += [words["interrupted"]] if "interrupted" in words else []
    for argument in arguments:
        texts = named.get(argument.id, []) if isinstance(argument, ast.Name) else _texts(argument)
        for text in texts:
            text = re.sub(f"{HOLE}+", HOLE, text)
            said = _SPEAKER.sub("", text)
            if len(re.findall(r"[^\W\d_]", said)) >= _FEW and " " in text:
                yield Text(name, text, file)


def _scopes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the module and its functions: a name means one thing within one of them."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of the functions in it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _within(node)


def _assigned(nodes: Sequence[ast.AST]) -> dict[str, list[str]]:
    """Return the texts that are given to a name, by the name."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found.setdefault(name, []).extend(_texts(value))
    return found


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
