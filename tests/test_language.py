"""Plain English: docstrings open with a subject or a verb.

A class name has one meaning; names that the integrations of two frameworks share are listed.
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
OF_FRAMEWORKS = {"RobustCallback"}
"""Class names that users import from the integrations of two frameworks, Lightning's and that of
transformers: a training uses one of them, so its script needs no second name."""

# A docstring that opens with one of these has no subject: the reader must find it in the code.
HEADLESS = re.compile(
    r"(?:What|Whether|How|Who|Which|Where|When|One that|Those|As|Of|All that|Whatever|Whoever"
    r"|Nobody|Everybody|It|Its|They|Their|There|Everything|Nothing|Something|May|Has|From|By|Else"
    r"|And|Or|Not|Until|Then|So|Raises|Also|Only|To)\b"
)
# "accusations" as a directory, a table of robust.toml or a JSON field, "accusation" as an event or
# finding, and "accused", a setting.
FORMAT = (
    r"""["/]accus[a-z-]+["/]|\[accusations\]|\.?\baccusations(\b:|\["|=|\b or)|\bACCUSATIONS\b"""
)


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
    ]
    assert headless == []


def test_a_class_name_of_the_product_has_one_meaning() -> None:
    found = defaultdict(set)
    for path in _files(PRODUCT):
        for name in _said(path).classes:
            found[name].add(_name(path))
    many = {name: sorted(files) for name, files in found.items() if len(files) > 1}
    assert {name for name, files in many.items() if len(files) > 2} == set()
    new = {name: files for name, files in many.items() if name not in OF_FRAMEWORKS}
    assert new == {}, "name these classes by what each of them is"
    assert OF_FRAMEWORKS - many.keys() == set(), "these names have one meaning: off the list"


def test_only_the_file_format_says_accusation() -> None:
    """A job reports a node. Settings, events and directories keep the old word."""
    found = [
        f"{_name(path)}:{number}: {line.strip()}"
        for path in _files(PRODUCT)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "accus" in re.sub(FORMAT, "", line).lower()
    ]
    assert found == [], "say report"


def test_tests_mirror_the_rooms() -> None:
    code = {_name(path.parent) for path in _files(PRODUCT) if path.name != "__init__.py"}
    tested = {_name(path.parent) for path in _files(("tests",)) if path.name.startswith("test_")}
    without = {folder for folder in code if f"tests/{folder}" not in tested}
    assert without == set(), "give these folders a folder of tests"
    strange = {
        folder
        for folder in tested - {"tests"}
        if not folder.startswith("tests/cluster/")
        and not (REPOSITORY / folder.removeprefix("tests/")).is_dir()
    }
    assert strange == set(), "no room has this name"
