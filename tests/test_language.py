"""Words of the product, and the rooms of the tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from places import REPOSITORY

PRODUCT = ("robust_slurm", "srun_wrapper", "health", "standby", "status", "prolog", "epilog")
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
