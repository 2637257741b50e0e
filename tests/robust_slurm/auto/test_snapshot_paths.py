"""Editable installs of the user's directory mean the snapshot, in the rank that runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from robust_slurm.auto.snapshot_paths import SOURCE, STORE, TREE, foreign, moved, use


@pytest.fixture
def top(tmp_path: Path) -> Path:
    for tree in ("c-1", "c-2"):
        (tmp_path / "store" / tree / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "proj" / ".venv" / "lib").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path)
    (tmp_path / "store" / "c-2" / ".venv").symlink_to(tmp_path / "proj" / ".venv")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("proj", "store/c-2"),
        ("proj/src", "store/c-2/src"),
        ("store/c-1/src/pkg", "store/c-2/src/pkg"),  # forked for another version
        ("store/c-2/src", "store/c-2/src"),
        ("proj/.venv/lib", "proj/.venv/lib"),  # what git ignores is live
        ("proj/gone", "proj/gone"),
        ("project/src", "project/src"),
        ("other", "other"),
        ("home/proj/src", "store/c-2/src"),  # through a link
        ("home/store/c-1/src/pkg", "store/c-2/src/pkg"),
        ("home/proj/.venv/lib", "home/proj/.venv/lib"),
        ("home/proj", "store/c-2"),
        ("home/other", "home/other"),
    ],
)
def test_a_path(top: Path, path: str, new: str) -> None:
    places = (str(top / "proj"), str(top / "store"), str(top / "store" / "c-2"))
    assert moved(str(top / path), *places) == str(top / new)
    assert moved("", *places) == ""


def test_the_path_and_the_finders(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finder = ModuleType("__editable___pkg_1_finder")
    finder.MAPPING = {"pkg": str(top / "proj" / "src" / "pkg")}  # type: ignore[attr-defined]
    finder.NAMESPACES = {"ns": [str(top / "proj" / "src")]}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(top / "proj" / "src")])
    before = sys.path
    use({})
    assert sys.path is before and sys.path[-1] == str(top / "proj" / "src")
    tree = top / "store" / "c-2"
    use({SOURCE: str(top / "proj"), STORE: str(top / "store"), TREE: str(tree)})
    assert sys.path[-1] == str(tree / "src")
    assert {"pkg": str(tree / "src" / "pkg")} == finder.MAPPING
    assert {"ns": [str(tree / "src")]} == finder.NAMESPACES


@pytest.mark.parametrize(
    ("path", "file", "place"),
    [
        ("store/c-2/src/pkg", False, False),
        ("store/c-1/src/pkg", True, True),
        ("store/c-1/.venv/lib", True, True),  # python by a relative path through a link to it
        ("store/c-22/src", True, True),
        ("proj/src/pkg", True, False),  # the rank's snapshot has a copy
        ("proj/.venv/lib", False, False),
        ("proj/gone", False, False),
        ("other", False, False),
    ],
)
def test_what_is_of_another_version(top: Path, path: str, file: bool, place: bool) -> None:
    names = {SOURCE: "proj", STORE: "store", TREE: "store/c-2"}
    environ = {name: str(top / value) for name, value in names.items()}
    given = str(top / path)
    assert foreign([given], [], environ) == (given if file else "")
    assert foreign([], [given], environ) == (given if place else "")
    assert foreign([given], [given], {}) == ""
