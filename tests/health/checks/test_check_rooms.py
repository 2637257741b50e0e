"""The families of checks: one file adds one, and a missing file closes the gate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from health import checks
from health.check import Check
from health.finding import ACTIONS

NAMES = list(checks.FAMILIES)


def rooms(top: Path, **files: str) -> str:
    for room in ("gpu", "host", "network"):
        (top / room).mkdir()
        (top / room / "__init__.py").touch()
    for name, room in files.items():
        (top / room / f"{name}.py").touch()
    return str(top)


def test_a_file_in_a_room_is_a_family(tmp_path: Path) -> None:
    found = checks.families(rooms(tmp_path, fans="host", cables="network", mounts="host"))
    assert list(found) == [*NAMES[:-1], "fans", "cables", "site"]
    assert (found["fans"], found["cables"], found["mounts"]) == ("host", "network", "host")


def test_a_named_family_without_a_file_is_a_check_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = checks.families(rooms(tmp_path))
    assert list(found) == NAMES
    monkeypatch.setattr(checks, "FAMILIES", {"fans": "host"})
    check = checks.load("fans")
    assert check.closes_on_error
    with pytest.raises(ImportError, match=r"health\.checks\.host\.fans cannot be imported"):
        check.run(None)  # type: ignore[arg-type]


def test_a_stray_file_in_a_room_is_no_family(tmp_path: Path) -> None:
    top = rooms(tmp_path)
    for name in ("._disk.py", ".#disk.py", "disk.orig.py", "aaa-bak.py"):
        (tmp_path / "host" / name).touch()
    (tmp_path / "host" / "gone.py").symlink_to("nowhere")
    assert list(checks.families(top)) == NAMES


def test_a_room_that_cannot_be_listed_closes_the_gate_by_its_families(tmp_path: Path) -> None:
    assert list(checks.families(str(tmp_path))) == NAMES


def test_a_file_that_ends_the_interpreter_is_a_broken_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(name: str) -> None:
        raise SystemExit(name)

    monkeypatch.setattr(checks, "import_module", leave)
    with pytest.raises(ImportError, match="cannot be imported: SystemExit"):
        checks.load("disk").run(None)  # type: ignore[arg-type]


def test_only_families_are_in_the_rooms() -> None:
    top = Path(checks.__file__).parent
    files = {path.stem for path in top.glob("*/*.py") if not path.name.startswith("_")}
    assert files == set(NAMES)


@pytest.mark.parametrize("check", checks.ALL, ids=lambda check: str(check.name))
def test_the_page_agrees_with_the_table(check: Check) -> None:
    path = Path(checks.__file__).parents[1] / "pages" / f"{check.name}.md"
    page = path.read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    cells = [(row[0].strip().strip("`"), *(cell.strip() for cell in row[1:])) for row in rows]
    conditions = [(c.check, c.status, c.cls, c.action, c.when) for c in check.conditions]
    settings = [(key, setting.default) for key, setting in check.settings.items()]
    assert [row for row in cells if len(row) == 5] == conditions
    if check.name == "site":  # its page also has the keys of one command
        assert {key for key, _ in settings} <= {row[0] for row in cells if len(row) == 3}
    else:
        assert [(row[0], json.loads(row[1])) for row in cells if len(row) == 3] == settings
    assert page.startswith(f"# {check.name}: ")


def test_the_tables_are_whole() -> None:
    conditions = [condition for check in checks.ALL for condition in check.conditions]
    assert len({condition.check for condition in conditions}) == len(conditions)
    assert all(condition.action in ACTIONS and condition.when for condition in conditions)
    assert all(setting.help for check in checks.ALL for setting in check.settings.values())
    assert [check.name for check in checks.ALL] == NAMES
