"""The plan of an install and of an uninstall, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from health.admin.install import Directory, InstallError, InstallPlan, Present, WantedFile, digest
from health.admin.plan import identity, paths_to_look_at, plan_install, plan_uninstall

ETC = "/etc/r"
UID = 0
STUB = WantedFile(f"{ETC}/prolog", "new\n", 0o755)
TOML = WantedFile(f"{ETC}/robust.toml", "# a = 1\n", 0o644, settings=True)
NOTHING = Present("none")


def there(text: str, mode: int = 0o644, uid: int = UID) -> Present:
    return Present("file", text, mode, uid)


def plan(
    wanted: WantedFile,
    present: Mapping[str, Present],
    manifest: Mapping[str, Any] | None = None,
    directories: tuple[Directory, ...] = (),
) -> InstallPlan:
    known = manifest or {}
    paths = paths_to_look_at([wanted], directories, known)
    seen = {path: present.get(path, NOTHING) for path in paths}
    return plan_install([wanted], directories, seen, known, UID, ETC, {"python": "/p"})


def steps(found: InstallPlan) -> list[tuple[str, str]]:
    """Return the plan's actions, without the manifest."""
    return [(c.action, c.path) for c in found.changes if c.path != f"{ETC}/manifest.json"]


def recorded(found: InstallPlan) -> dict[str, Any]:
    """The manifest as it would be written."""
    (change,) = [c for c in found.changes if c.path == f"{ETC}/manifest.json"]
    manifest: dict[str, Any] = json.loads(change.text)
    return manifest


def manifest_of(wanted: WantedFile, text: str, **more: str) -> dict[str, Any]:
    """Build the manifest after an install of ``text`` at the path of ``wanted``."""
    return {"v": 1, "files": {wanted.path: {"sha256": digest(text), **more}}, "dirs": []}


@pytest.mark.parametrize(
    ("present", "manifest", "expected"),
    [
        (NOTHING, {}, [("create", STUB.path)]),
        (there("new\n", 0o755), {}, []),  # an install that was cut off: its files are ours
        (there("new\n", 0o644), {}, [("mode", STUB.path)]),
        (there("new\n", 0o755, 7), {}, [("mode", STUB.path)]),
        (there("old\n", 0o755), manifest_of(STUB, "old\n"), [("replace", STUB.path)]),
        (there("edited\n", 0o755), manifest_of(STUB, "old\n"), [("replace", STUB.path)]),
    ],
)
def test_stub(present: Present, manifest: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    found = plan(STUB, {STUB.path: present}, manifest)
    assert steps(found) == expected
    assert recorded(found)["files"][STUB.path] == {"sha256": digest("new\n")}


def test_a_hand_made_change_of_a_stub_is_told() -> None:
    found = plan(STUB, {STUB.path: there("edited\n", 0o755)}, manifest_of(STUB, "old\n"))
    assert found.notes == (f"{STUB.path} was changed by hand; the change is lost",)
    assert "-edited\n+new\n" in found.changes[0].diff


@pytest.mark.parametrize("present", [there("a prolog of the site\n"), Present("other")])
def test_a_file_of_somebody_else_is_not_replaced(present: Present) -> None:
    with pytest.raises(InstallError, match=r"/etc/r/prolog .*move it away"):
        plan(STUB, {STUB.path: present})


def test_nothing_to_do_the_second_time() -> None:
    first = plan(STUB, {})
    assert not plan(STUB, {STUB.path: there("new\n", 0o755)}, recorded(first)).changes


NEW, LAST = TOML.path + ".new", TOML.path + ".last"
OLD = "# old = 1\n"


@pytest.mark.parametrize(
    ("present", "manifest", "expected"),
    [
        ({}, {}, [("create", TOML.path)]),
        # as it was written: the new text replaces it
        ({TOML.path: there(OLD)}, manifest_of(TOML, OLD), [("replace", TOML.path)]),
        # written by its admin before the first install, or edited since
        ({TOML.path: there("a = 2\n")}, {}, [("create", NEW)]),
        ({TOML.path: there("a = 2\n")}, manifest_of(TOML, OLD), [("create", NEW)]),
        # the same new text is offered once
        (
            {TOML.path: there("a = 2\n")},
            manifest_of(TOML, OLD, offered=digest(TOML.text)),
            [],
        ),
        ({TOML.path: there("a = 2\n"), NEW: there(TOML.text)}, {}, []),
        ({TOML.path: there("a = 2\n"), NEW: there(OLD)}, {}, [("replace", NEW)]),
    ],
)
def test_settings(
    present: dict[str, Present], manifest: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    found = plan(TOML, present, manifest)
    assert steps(found) == expected
    record = recorded(found)["files"]
    assert record[TOML.path]["offered"] == digest(TOML.text)
    seen = {path: present.get(path, NOTHING) for path in (TOML.path, NEW, LAST)}
    for change in found.changes:
        seen[change.path] = there(change.text, change.mode)
    assert not plan(TOML, seen, recorded(found)).changes, "the second time"
    left = [p for k, p in steps(plan_uninstall(recorded(found), seen, ETC)) if k]
    edited = present.get(TOML.path, NOTHING).text == "a = 2\n"
    assert (TOML.path in left) is not edited, "an edited file is never removed"


def test_a_file_that_is_not_wanted_any_more_goes() -> None:
    old = STUB._replace(path=f"{ETC}/old")
    manifest = manifest_of(old, "old\n")
    assert ("remove", old.path) in steps(plan(STUB, {old.path: there("old\n")}, manifest))
    kept = plan(STUB, {old.path: there("edited\n")}, manifest)
    assert ("remove", old.path) not in steps(kept)
    assert kept.notes == (f"left: {old.path} (changed since it was installed)",)
    assert old.path not in recorded(kept)["files"]


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (NOTHING, [("mkdir", "/s")]),
        (Present("dir", mode=0o755), []),
        (Present("dir", mode=0o700), []),  # narrower than ours: its admin's choice
    ],
)
def test_directories(present: Present, expected: list[tuple[str, str]]) -> None:
    seen = {"/s": present, STUB.path: there("new\n", 0o755)}
    found = plan(STUB, seen, directories=(Directory("/s", 0o755),))
    assert steps(found) == expected
    assert recorded(found)["dirs"] == (["/s"] if present is NOTHING else [])


def test_what_is_in_the_place_of_a_directory() -> None:
    with pytest.raises(InstallError, match="/s is not a directory"):
        plan(STUB, {"/s": there("x")}, directories=(Directory("/s", 0o755),))


def test_what_was_shown_is_what_is_done() -> None:
    one, other = plan(STUB, {}), plan(STUB._replace(text="other\n"), {})
    assert identity(one) == identity(plan(STUB, {}))
    assert identity(one) != identity(other)
