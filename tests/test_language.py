"""Plain English and small files: docstrings open with a subject or a verb, no file grows large.

A class name has one meaning. What is not so yet is listed; the lists may only shrink.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from places import REPOSITORY

PRODUCT = ("robust_slurm", "srun_wrapper", "health", "standby", "status", "prolog", "epilog")
CODE = (*PRODUCT, "lab", "bench")
ROOMS = (*CODE, "tests")
LINES = 350
FILES = 16
TWICE = {
    # A store's event, and the message that carries it (decision 42).
    *("Alarm", "Committed", "Enrolled", "Persisted", "Resumed", "Saved"),
    # A record in a file, and the object in memory.
    *("Event", "Incident"),
    # Slurm's node, and the agent's; a store's rank, and the job's.
    *("Node", "Rank"),
    "RobustCallback",  # Lightning's, and that of transformers
}
"""Class names that have two meanings. Add none."""
TWICE_WITH_DATA = {
    *("Asked", "Bad", "Budget", "Claim", "Failure", "Feed", "File", "Lane", "Line", "Made"),
    *("Options", "Page", "Part", "Plan", "Ref", "Ring", "Sample", "Server", "Source", "Step"),
    *("_Entry", "_Window"),
}
"""Class names that ``robust_slurm.data`` has, and another room. Add none."""

# A docstring that opens with one of these has no subject: the reader must find it in the code.
HEADLESS = re.compile(
    r"(?:What|Whether|How|Who|Which|Where|When|One that|Those|As|Of|All that|Whatever|Whoever"
    r"|Nobody|Everybody)\b"
)
# In the code of the rooms these are no subject either. Two folders are still to be mended.
FRAGMENT = re.compile(
    r"(?:It|Its|They|Their|There|Everything|Nothing|Something|May|Has|From|By|Else|And|Or|Not|Until"
    r"|Then|So|Raises|Also|Only|To)\b"
)
FRAGMENTS_IN = ("robust_slurm/data/", "srun_wrapper/agent/data/")
# "accusations" as a directory, a table of robust.toml or a JSON field, "accusation" as an event or
# finding, and "accused", a setting.
FORMAT = (
    r"""["/]accus[a-z-]+["/]|\[accusations\]|\.?\baccusations(\b:|\["|=|\b or)|\bACCUSATIONS\b"""
)
GENERATED = {"health/nvidia/xid_catalog.py"}  # a table of NVIDIA's, by generate_xid.py


def _name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def _files(rooms: tuple[str, ...]) -> Iterator[Path]:
    for room in rooms:
        yield from (REPOSITORY / room).rglob("*.py")


class Said(NamedTuple):
    """The docstrings of a file by line, those of attributes as well, and its classes."""

    docstrings: list[tuple[int, str]]
    classes: list[str]


@cache
def _said(path: Path) -> Said:
    said = Said([], [])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                said.docstrings.append((node.lineno, text.strip()))
            case ast.ClassDef(name=name):
                said.classes.append(name)
    return said


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_open_with_a_subject_or_a_verb(room: str) -> None:
    headless = [
        f"{_name(path)}:{line}: {text.splitlines()[0]}"
        for path in _files((room,))
        for line, text in _said(path).docstrings
        if HEADLESS.match(text)
        or (room in CODE and FRAGMENT.match(text) and not _name(path).startswith(FRAGMENTS_IN))
    ]
    assert headless == []


def test_no_file_of_code_becomes_long() -> None:
    long = {
        _name(path)
        for path in _files(CODE)
        if len(path.read_text(encoding="utf-8").splitlines()) > LINES
    }
    assert long - GENERATED == set(), f"split files of more than {LINES} lines by idea"


def test_no_folder_of_code_becomes_full() -> None:
    files = [path.parent for path in _files(CODE)]
    full = {_name(folder) for folder in set(files) if files.count(folder) > FILES}
    assert full == set(), f"divide folders of more than {FILES} files by subject"


def test_a_class_name_of_the_product_has_one_meaning() -> None:
    found = defaultdict(set)
    for path in _files(PRODUCT):
        for name in _said(path).classes:
            found[name].add(_name(path))
    many = {name: sorted(files) for name, files in found.items() if len(files) > 1}
    assert {name for name, files in many.items() if len(files) > 2} == set()
    new = {name: files for name, files in many.items() if name not in TWICE | TWICE_WITH_DATA}
    assert new == {}, "name these classes by what each of them is"
    assert TWICE - many.keys() == set(), "these names have one meaning: take them off the list"


def test_only_the_file_format_says_accusation() -> None:
    """A job reports a node. Settings, events and directories keep the old word."""
    found = [
        f"{_name(path)}:{number}: {line.strip()}"
        for path in _files(PRODUCT)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "accus" in re.sub(FORMAT, "", line).lower()
    ]
    assert found == [], "say report"
