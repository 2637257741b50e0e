"""Users who could change what root runs, and the line that puts it right."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from admin_prefix import REPOSITORY

from health.admin import trust
from health.admin.doctor import site_rules
from health.node import trust as look
from health.node.trust import Hole


def test_code_that_others_can_write() -> None:
    (good,) = site_rules.of_code("/opt/r", [], "", "", [])
    assert good.level == "ok"
    bad = site_rules.of_code("/opt/r", ["/opt/r belongs to uid 7"], "chown", "no start", ["a note"])
    assert [remark.level for remark in bad] == ["fix", "fix", "advice"]
    assert bad[1].line == "chown"


def test_the_repair_of_code_spares_the_system(tmp_path: Path) -> None:
    """All of a virtual environment; of any other prefix (/usr) only the places themselves."""
    mine, deep = Hole(f"{tmp_path}/lib", "x"), Hole(f"{tmp_path}/lib/a b", "x")
    places = f"{tmp_path}/lib '{tmp_path}/lib/a b'"
    narrow = f"chown -h root:root {places} && chmod go-w {places}"
    assert trust.repair(str(tmp_path), [mine, deep]) == narrow
    (tmp_path / "pyvenv.cfg").touch()
    whole = f"chown -R root:root {tmp_path} && chmod -R go-w {tmp_path}"
    assert trust.repair(str(tmp_path), [mine, deep]) == whole
    assert "-R" not in trust.repair(str(tmp_path), [Hole("/opt", "x")])


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others: root")
def test_who_could_change_a_file(tmp_path: Path) -> None:
    top = tmp_path / "top"
    file = top / "in" / "prolog"
    file.parent.mkdir(parents=True)
    file.write_text("x")
    for path in (top, file.parent, file):
        path.chmod(0o755)
    assert said(file) == ""
    link = tmp_path / "link"
    link.symlink_to(file)
    assert said(link) == ""
    os.chown(link, 7, 7, follow_symlinks=False)
    assert said(link) == f"{link} belongs to uid 7"
    top.chmod(0o775)
    assert said(file) == f"{top} can be written by others (mode 0775)"
    top.chmod(0o1777)
    assert said(file) == "", "sticky, as /tmp"
    top.chmod(0o755)
    os.chown(file.parent, 7, 7)
    assert said(file) == f"{file.parent} belongs to uid 7"
    assert "No such file" in said(top / "nope")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "too many levels" in said(loop)


def said(path: Path) -> str:
    return str(look.hole(str(path)) or "")


@pytest.mark.skipif(os.geteuid() != 0, reason="files of others are judged: root")
@pytest.mark.parametrize(
    ("tool", "instead", "told"),
    [
        ("", "", "ran"),
        ("namei", "", "namei is not installed"),
        ("namei", "exit 1", "was not run"),
        ("awk", "exit 1", "was not run"),
        ("find", "", "find is not installed"),
        ("find", "exit 1", "could not be looked at whole"),
        ("find", 'case "$*" in -L*) ;; *) exit 1 ;; esac', "could not be looked at whole"),
    ],
)
def test_a_look_that_fails_finds_nothing_good(
    tmp_path: Path, tool: str, instead: str, told: str
) -> None:
    """Without ``namei`` anything was run as root: what came out of it was empty."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("id", "namei", "awk", "find"):
        if name != tool:
            (tools / name).symlink_to(str(shutil.which(name)))
        elif instead:
            (tools / name).write_text(f"#!/bin/sh\n{instead}\n")
            (tools / name).chmod(0o755)
    code = tmp_path / "code"
    code.mkdir()
    (code / "module.py").touch()
    (code / "link.py").symlink_to(code / "module.py")
    text = (REPOSITORY / "templates" / "look.sh").read_text()
    script = text.replace("PATH=/usr/sbin:/usr/bin:/sbin:/bin", f"PATH={tools}")
    assert script != text
    argv = ["/bin/sh", "-c", script, "sh", str(code), "--", "/bin/echo", "ran"]
    done = subprocess.run(argv, env={}, capture_output=True, text=True, timeout=30)
    assert told in done.stdout + done.stderr
    assert (done.returncode == 0) is (done.stdout == "ran\n") is (not tool)


def test_the_interpreter_of_the_active_tests() -> None:
    (good,) = site_rules.of_active("/opt/t/bin/python", None, "")
    assert good.level == "ok"
    (bad,) = site_rules.of_active("/opt/t/bin/python", Hole("/opt/t/x.pth", "is open"), "")
    assert (bad.level, bad.line) == (
        "fix",
        "chown -h root:root /opt/t/x.pth && chmod go-w /opt/t/x.pth",
    )
    (slow,) = site_rules.of_active("/opt/t/bin/python", None, "no answer in 30 s")
    assert slow.level == "fix" and "no answer" in slow.what
