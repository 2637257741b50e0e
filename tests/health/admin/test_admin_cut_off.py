"""Installs that were cut off anywhere, or found a full disk: run again, or taken back."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import installed_files
import pytest
from installed_files import carry_out, newer, tree

from health.admin import install, node
from health.admin.install import FileChange, InstallError, InstallPlan, WantedFile
from health.admin.node import AdminRequest, perform

pytestmark = pytest.mark.slow

request_for = installed_files.request_for


def cut_off(request: AdminRequest, after: int) -> bool:
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
    request_for: AdminRequest,
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
        assert not carry_out(AdminRequest("uninstall", wanted.etc)).error
        left = {name for name, (_, text) in everything(tmp_path).items() if text}
        if not after:  # nothing was begun but the manifest itself
            left -= {"etc/.manifest.json.robust-admin"}
        assert left == ({"etc/robust.toml"} if edited else set()), "it can be taken back too"
    assert after > 3


def test_cut_off_while_it_is_taken_away(tmp_path: Path, request_for: AdminRequest) -> None:
    carry_out(request_for)
    gone = perform(AdminRequest("uninstall", request_for.etc))
    real = Path.unlink
    for name in ("prolog", "robust.toml", "manifest.json"):
        with pytest.MonkeyPatch.context() as patch:

            def unlink(path: Path, missing_ok: bool = False, name: str = name) -> None:
                if path.name == name:
                    raise KeyboardInterrupt
                real(path, missing_ok)

            patch.setattr(Path, "unlink", unlink)
            with pytest.raises(KeyboardInterrupt):
                perform(AdminRequest("uninstall", request_for.etc, gone.identity))
        gone = perform(AdminRequest("uninstall", request_for.etc))
    assert not carry_out(AdminRequest("uninstall", request_for.etc)).error
    assert not tree(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts: root")
def test_a_disk_that_is_full(tmp_path: Path, request_for: AdminRequest) -> None:
    """Said with the path; with room again the same command does the rest."""
    etc = Path(request_for.etc)
    etc.mkdir(mode=0o755)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=755", "none", str(etc)]
    subprocess.run(mount, check=True, timeout=30)
    try:
        big = WantedFile(f"{etc}/prolog", "#" * 12_000, 0o755)
        request = request_for._replace(files=[*request_for.files[1:], big])
        reply = carry_out(request)
        assert reply.error == f"{etc}/prolog: No space left on device"
        assert sorted(path.name for path in etc.iterdir()) == ["manifest.json", "robust.toml"]
        subprocess.run(["mount", "-o", "remount,size=1m", str(etc)], check=True, timeout=30)
        assert not carry_out(request).error
        assert (etc / "prolog").stat().st_size == 12_000
    finally:
        subprocess.run(["umount", str(etc)], check=True, timeout=30)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InstallError, match=r"file: No space left"):
        install.apply(InstallPlan((FileChange("replace", str(target), 0o644, "new"),), ()))
    assert list(tree(tmp_path).values()) == [(stat.S_IMODE(target.stat().st_mode), "old")]
