"""The page of the house names files that are there, and every room of the big ones."""

from __future__ import annotations

import re

import pytest
from places import REPOSITORY

PAGES = ("docs/architecture.md", "CONTRIBUTING.md")
ROOMS = ("srun_wrapper", "health", "robust_slurm/checkpoint", "standby")


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_folder_that_a_page_names_is_there(page: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    named = [n for n in re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|/))`", text) if "NAME" not in n]
    known = {
        f"/{path.relative_to(REPOSITORY)}"
        for room in (*ROOMS, "*")
        for path in (*REPOSITORY.glob(f"{room}/**/*.py"), *REPOSITORY.glob(f"{room}/**/"))
        if ".venv" not in path.parts
    }
    assert len(named) > 10
    assert [
        name for name in named if not any(k.endswith(f"/{name.rstrip('/')}") for k in known)
    ] == []


def test_every_file_of_ours_that_mechanisms_names_is_there() -> None:
    text = (REPOSITORY / "docs/mechanisms.md").read_text(encoding="utf-8")
    text = re.sub(r"^robust-srun: .*$", "", text, flags=re.MULTILINE)  # output: files of a training
    named = set(re.findall(r"(?<![\w/*-])[\w/]+\.py\b", text))
    known = {
        f"/{path.relative_to(REPOSITORY)}"
        for path in REPOSITORY.glob("*/**/*.py")
        if ".venv" not in path.parts
    }
    assert len(named) > 10
    assert sorted(n for n in named if not any(k.endswith(f"/{n}") for k in known)) == []


def test_every_test_that_the_docs_name_is_there() -> None:
    pages = sorted((REPOSITORY / "docs").glob("**/*.md"))
    named = [
        (p.name, n)
        for p in pages
        for n in re.findall(r"`(tests/[\w/]+\.py)`", p.read_text("utf-8"))
    ]
    assert len(named) > 3
    assert [each for each in named if not (REPOSITORY / each[1]).is_file()] == []


def test_the_page_of_the_house_names_every_room_within_a_room() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    missing = [
        f"{room}/{path.name}"
        for room in ROOMS
        for path in sorted((REPOSITORY / room).iterdir())
        if (path / "__init__.py").is_file() and f"`{path.name}/`" not in text
    ]
    assert missing == []
