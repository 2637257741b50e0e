"""What robust-admin puts into place: the plan as data, and the same on a real directory."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from health.admin import install, node
from health.admin.install import Change, Directory, InstallError, Plan, Present, Wanted
from health.admin.node import Reply, Request, perform

ETC = "/etc/r"
UID = 0
STUB = Wanted(f"{ETC}/prolog", "new\n", 0o755)
TOML = Wanted(f"{ETC}/robust.toml", "# a = 1\n", 0o644, settings=True)
NOTHING = Present("none")


def there(text: str, mode: int = 0o644, uid: int = UID) -> Present:
    return Present("file", text, mode, uid)


def plan(
    wanted: Wanted,
    present: Mapping[str, Present],
    manifest: Mapping[str, Any] | None = None,
    directories: tuple[Directory, ...] = (),
) -> Plan:
    known = manifest or {}
    paths = install.paths_to_look_at([wanted], directories, known)
    seen = {path: present.get(path, NOTHING) for path in paths}
    return install.plan_install([wanted], directories, seen, known, UID, ETC, {"python": "/p"})


def steps(found: Plan) -> list[tuple[str, str]]:
    """What is done, without the manifest."""
    return [(c.action, c.path) for c in found.changes if c.path != f"{ETC}/manifest.json"]


def recorded(found: Plan) -> dict[str, Any]:
    """The manifest as it would be written."""
    (change,) = [c for c in found.changes if c.path == f"{ETC}/manifest.json"]
    manifest: dict[str, Any] = json.loads(change.text)
    return manifest


def manifest_of(wanted: Wanted, text: str, **more: str) -> dict[str, Any]:
    """As after an install of ``text`` at the path of ``wanted``."""
    return {"v": 1, "files": {wanted.path: {"sha256": install.digest(text), **more}}, "dirs": []}


# ---- the plan


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
    assert recorded(found)["files"][STUB.path] == {"sha256": install.digest("new\n")}


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
            manifest_of(TOML, OLD, offered=install.digest(TOML.text)),
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
    assert record[TOML.path]["offered"] == install.digest(TOML.text)
    seen = {path: present.get(path, NOTHING) for path in (TOML.path, NEW, LAST)}
    for change in found.changes:
        seen[change.path] = there(change.text, change.mode)
    assert not plan(TOML, seen, recorded(found)).changes, "the second time"
    left = [p for k, p in steps(install.plan_uninstall(recorded(found), seen, ETC)) if k]
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
    assert install.identity(one) == install.identity(plan(STUB, {}))
    assert install.identity(one) != install.identity(other)


# ---- on a real directory


@pytest.fixture
def request_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Request:
    """Stub, settings and spool below tmp_path; the modules that are proved exist."""
    monkeypatch.setattr(node, "MODULES", ("json",))
    monkeypatch.setattr(node, "NVML", "ast")
    etc = tmp_path / "etc"
    return Request(
        "install",
        str(etc),
        "",
        [
            Wanted(f"{etc}/prolog", "#!/bin/sh\n", 0o755),
            Wanted(f"{etc}/robust.toml", "# a = 1\n", 0o644, settings=True),
        ],
        [Directory(str(etc), 0o755), Directory(f"{tmp_path}/spool", 0o755)],
        "/usr/bin/python3",
        (),
    )


def carry_out(request: Request) -> Reply:
    looked = perform(request)
    assert not looked.error
    return perform(request._replace(expect=looked.identity))


def tree(top: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(top)): (
            stat.S_IMODE(path.stat().st_mode),
            path.read_text() if path.is_file() else "",
        )
        for path in sorted(top.rglob("*"))
    }


def test_install_twice_and_uninstall(tmp_path: Path, request_for: Request) -> None:
    assert not tree(tmp_path)
    done = carry_out(request_for)
    assert done.done and not done.error
    found = tree(tmp_path)
    names = ["manifest.json", "prolog", "robust.toml", "robust.toml.last"]
    assert list(found) == ["etc", *(f"etc/{name}" for name in names), "spool"]
    assert found["etc/robust.toml.last"] == found["etc/robust.toml"] == (0o644, "# a = 1\n")
    assert found["etc/prolog"] == (0o755, "#!/bin/sh\n")
    assert found["spool"][0] == 0o755
    again = perform(request_for)
    assert not again.changes and not again.notes
    gone = carry_out(Request("uninstall", request_for.etc))
    assert not gone.error and not gone.notes
    assert not tree(tmp_path)
    nothing = perform(Request("uninstall", request_for.etc))
    assert not nothing.changes and "nothing is installed" in nothing.notes[0]


def test_the_copy_of_the_settings_is_of_the_last_good_ones(
    tmp_path: Path, request_for: Request
) -> None:
    (tmp_path / "etc").mkdir(mode=0o755)
    toml, last = (tmp_path / "etc" / name for name in ("robust.toml", "robust.toml.last"))
    toml.write_text("[gate]\ndry_run = true\n")
    toml.chmod(0o644)
    carry_out(request_for)
    assert last.read_text() == toml.read_text(), "what its admin wrote, not what is offered"
    toml.write_text("[gate\n")
    assert not carry_out(newer(request_for)).error
    assert last.read_text() == "[gate]\ndry_run = true\n"
    gone = perform(Request("uninstall", request_for.etc))
    assert ("remove", str(last)) in [(action, path) for action, path, _ in gone.changes]
    assert not carry_out(Request("uninstall", request_for.etc)).error
    assert list(tree(tmp_path)) == ["etc", "etc/robust.toml"]


def test_looking_changes_nothing(tmp_path: Path, request_for: Request) -> None:
    assert perform(request_for).changes
    assert not tree(tmp_path)


def test_uninstall_leaves_what_was_edited(tmp_path: Path, request_for: Request) -> None:
    carry_out(request_for)
    (tmp_path / "etc" / "robust.toml").write_text("a = 2\n")
    (tmp_path / "spool" / "history.jsonl").write_text("{}\n")
    gone = carry_out(Request("uninstall", request_for.etc))
    assert list(tree(tmp_path)) == ["etc", "etc/robust.toml", "spool", "spool/history.jsonl"]
    assert len([note for note in gone.notes if note.startswith("left: ")]) == 3
    again = carry_out(request_for)
    assert not again.error
    assert (tmp_path / "etc" / "robust.toml").read_text() == "a = 2\n"
    assert (tmp_path / "etc" / "robust.toml.new").read_text() == "# a = 1\n"


def test_a_change_since_it_was_shown_stops_it(tmp_path: Path, request_for: Request) -> None:
    looked = perform(request_for)
    (tmp_path / "etc").mkdir()
    late = perform(request_for._replace(expect=looked.identity))
    assert "changed since they were looked at" in late.error
    assert list(tree(tmp_path)) == ["etc"]


def test_a_link_is_not_followed(tmp_path: Path, request_for: Request) -> None:
    carry_out(request_for)
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    stub = tmp_path / "etc" / "prolog"
    stub.unlink()
    stub.symlink_to(victim)
    assert "not a regular file" in perform(request_for).error
    assert victim.read_text() == "mine\n"


def test_concurrent_installs(tmp_path: Path, request_for: Request) -> None:
    """One of them does it; the others see that it was done meanwhile."""
    looked = perform(request_for)
    replies: list[Reply] = []
    order = request_for._replace(expect=looked.identity)
    threads = [threading.Thread(target=lambda: replies.append(perform(order))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(bool(reply.error) for reply in replies) == [False] + [True] * 5
    assert not perform(request_for).changes
    assert not [name for name in tree(tmp_path) if "/." in name], "no drafts are left"


# ---- cut off in the middle


def cut_off(request: Request, after: int) -> bool:
    """Carry it out in a process that dies at its so-manieth fsync; False: it came to its end."""
    looked = perform(request)
    child = os.fork()
    if child == 0:
        left = [after]
        real = os.fsync

        def fsync(fd: int) -> None:
            if not left[0]:
                os._exit(9)
            left[0] -= 1
            real(fd)

        os.fsync = fsync
        os._exit(1 if perform(request._replace(expect=looked.identity)).error else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def newer(request: Request) -> Request:
    """The next release: another prolog, other settings offered, one more file."""
    etc = request.etc
    return request._replace(
        files=[
            Wanted(f"{etc}/prolog", "#!/bin/sh\n# new\n", 0o755),
            Wanted(f"{etc}/robust.toml", "# a = 2\n", 0o644, settings=True),
            Wanted(f"{etc}/epilog", "#!/bin/sh\n", 0o755),
        ]
    )


def everything(top: Path) -> dict[str, tuple[int, str]]:
    """The tree, and then nothing of it any more."""
    found = tree(top)
    shutil.rmtree(top / "etc", ignore_errors=True)
    shutil.rmtree(top / "spool", ignore_errors=True)
    return found


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("upgrade", [False, True])
def test_cut_off_anywhere_and_run_again(
    tmp_path: Path,
    request_for: Request,
    monkeypatch: pytest.MonkeyPatch,
    upgrade: bool,
    edited: bool,
) -> None:
    monkeypatch.setattr(node, "probe", lambda python, dirs: [])
    wanted = newer(request_for) if upgrade else request_for

    def before() -> None:
        if upgrade:
            carry_out(request_for)
        if edited:
            (tmp_path / "etc").mkdir(mode=0o755, exist_ok=True)
            (tmp_path / "etc" / "robust.toml").write_text("a = 7\n")

    before()
    assert not carry_out(wanted).error
    whole = everything(tmp_path)
    if edited:
        assert whole["etc/robust.toml"][1] == "a = 7\n"
        assert whole["etc/robust.toml.new"][1] == wanted.files[1].text
    for after in range(100):
        before()
        if not cut_off(wanted, after):
            break
        again = carry_out(wanted)
        assert not again.error
        assert not [note for note in again.notes if "by hand" in note], "they are our own files"
        assert not perform(wanted).changes
        found = everything(tmp_path)
        if not after:  # who made the first directory is forgotten
            found["etc/manifest.json"] = whole["etc/manifest.json"]
        assert found == whole
        before()
        cut_off(wanted, after)
        assert not carry_out(Request("uninstall", wanted.etc)).error
        left = {name for name, (_, text) in everything(tmp_path).items() if text}
        if not after:  # nothing was begun but the manifest itself
            left -= {"etc/.manifest.json.robust-admin"}
        assert left == ({"etc/robust.toml"} if edited else set()), "it can be taken back too"
    assert after > 3


def test_cut_off_while_it_is_taken_away(tmp_path: Path, request_for: Request) -> None:
    carry_out(request_for)
    gone = perform(Request("uninstall", request_for.etc))
    real = Path.unlink
    for name in ("prolog", "robust.toml", "manifest.json"):
        with pytest.MonkeyPatch.context() as patch:

            def unlink(path: Path, missing_ok: bool = False, name: str = name) -> None:
                if path.name == name:
                    raise KeyboardInterrupt
                real(path, missing_ok)

            patch.setattr(Path, "unlink", unlink)
            with pytest.raises(KeyboardInterrupt):
                perform(Request("uninstall", request_for.etc, gone.identity))
        gone = perform(Request("uninstall", request_for.etc))
    assert not carry_out(Request("uninstall", request_for.etc)).error
    assert not tree(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts: root")
def test_a_disk_that_is_full(tmp_path: Path, request_for: Request) -> None:
    """Said with the path; with room again the same command does the rest."""
    etc = Path(request_for.etc)
    etc.mkdir(mode=0o755)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=755", "none", str(etc)]
    subprocess.run(mount, check=True, timeout=30)
    try:
        big = Wanted(f"{etc}/prolog", "#" * 12_000, 0o755)
        request = request_for._replace(files=[*request_for.files[1:], big])
        reply = carry_out(request)
        assert reply.error == f"{etc}/prolog: No space left on device"
        assert sorted(path.name for path in etc.iterdir()) == ["manifest.json", "robust.toml"]
        subprocess.run(["mount", "-o", "remount,size=1m", str(etc)], check=True, timeout=30)
        assert not carry_out(request).error
        assert (etc / "prolog").stat().st_size == 12_000
    finally:
        subprocess.run(["umount", str(etc)], check=True, timeout=30)


# ---- code and places that are not root's alone


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: root")
def test_what_others_could_change_is_not_installed(tmp_path: Path, request_for: Request) -> None:
    packages = tmp_path / "lib" / "health"
    packages.mkdir(parents=True)
    packages.chmod(0o755)
    module = packages / "gate.py"
    module.touch(mode=0o644)
    request = request_for._replace(dirs=[str(tmp_path / "lib")])
    assert not perform(request).error
    os.chown(module, 7, 7)
    error = perform(request).error
    assert error.startswith(f"{module} belongs to uid 7: who writes there is root at the next job")
    assert error.endswith(f"chown -h root:root {module} && chmod go-w {module}")
    os.chown(module, 0, 0)
    packages.chmod(0o777)
    assert f"{packages} can be written by others (mode 0777)" in perform(request).error
    packages.chmod(0o755)
    place = tmp_path / "users"
    place.mkdir()
    os.chown(place, 7, 7)
    error = perform(request._replace(directories=[Directory(f"{place}/a/etc", 0o755)])).error
    assert error.startswith(f"{place}/a/etc: {place} belongs to uid 7: root's files must lie")
    assert not (tmp_path / "etc").exists()


def test_a_manifest_that_others_could_write(tmp_path: Path, request_for: Request) -> None:
    carry_out(request_for)
    manifest = tmp_path / "etc" / "manifest.json"
    victim = tmp_path / "victim"
    victim.write_text("x\n")
    record = {"v": 1, "files": {str(victim): {"sha256": install.digest("x\n")}}, "dirs": []}
    manifest.write_text(json.dumps(record))
    manifest.chmod(0o666)
    assert "can be written by others" in perform(Request("uninstall", request_for.etc)).error
    assert victim.exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"v": 2, "files": {}, "dirs": []}', '{"v": 1, "files": {"a": 1}}']
)
def test_a_manifest_that_is_none(tmp_path: Path, request_for: Request, text: str) -> None:
    carry_out(request_for)
    (tmp_path / "etc" / "manifest.json").write_text(text)
    assert "manifest.json" in perform(request_for).error


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InstallError, match=r"file: No space left"):
        install.apply(Plan((Change("replace", str(target), 0o644, "new"),), ()))
    assert list(tree(tmp_path).values()) == [(stat.S_IMODE(target.stat().st_mode), "old")]


# ---- the proof that the stubs would start


def test_stubs_that_would_not_start_are_not_installed(
    tmp_path: Path, request_for: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "MODULES", ("json", "no_such_package.cli"))
    reply = perform(request_for)
    assert "cannot import no_such_package.cli" in reply.error
    monkeypatch.setattr(node, "MODULES", ())
    assert (
        "/nowhere/python3 does not start"
        in perform(request_for._replace(python="/nowhere/python3")).error
    )
    assert "-IS failed" in perform(request_for._replace(python="/bin/false")).error
    assert not tree(tmp_path)


def test_without_nvml_it_is_said(request_for: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "NVML", "no_such_nvml")
    reply = perform(request_for)
    assert not reply.error and "no_such_nvml" in reply.notes[0]


def test_a_request_survives_its_journey(request_for: Request) -> None:
    back = Request.from_json(request_for.as_json())
    assert back.as_json() == request_for.as_json()
    assert perform(back).identity == perform(request_for).identity
    with pytest.raises(InstallError, match="another version"):
        Request.from_json(request_for.as_json().replace('"protocol": 1', '"protocol": 9'))
