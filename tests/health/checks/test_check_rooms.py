"""The families of checks: one file adds one, and a missing file closes the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from health import checks

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
