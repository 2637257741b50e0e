"""The paths that root executes, to which a command, a script and an interpreter lead."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from job_leftovers import OTHER, needs_root

from health import settings
from health.node import trust
from health.node.executed import of_command, of_python
from health.run.live import LiveSystem, context

FILE = "/etc/hostname"


@pytest.mark.parametrize(
    ("argv", "also"),
    [
        (["/bin/sh", FILE], [FILE]),
        (["/bin/sh", "-c", f". {FILE}"], [FILE]),
        (["/usr/bin/env", "-i", "A=1", "timeout", "5", "/nope/tool"], ["/nope/tool"]),
        (["/bin/bash", "-c", "if true; then /nope/tool; fi"], ["/nope/tool"]),
        (["/bin/sh", "-c", "cd /nope && ./tool"], ["/nope"]),
        (["/bin/sh", "-c", "PATH=/nope/bin:/bin tool"], ["/nope/bin", "/bin"]),
        (["/bin/sh", "-c", 'exec "/nope/tool" -q'], ["/nope/tool"]),
        (["/bin/sh", "-c", 'PATH="/nope/bin:$PATH" tool'], ["/nope/bin"]),
        (["/bin/sh", "-c", "export PATH='/nope/bin'; tool"], ["/nope/bin"]),
        (["/bin/sh", "-c", "LD_PRELOAD=/nope/x.so ls"], ["/nope/x.so"]),
        (["/bin/sh", "-c", "case a in a) /nope/tool;; esac"], ["/nope/tool"]),
        # Data: tested, written to, or given to a program that is no shell.
        (["/bin/sh", "-c", f"[ -e {FILE} ] && df /nope > /nope/out"], []),
        (["/usr/bin/test", "-e", FILE], []),
        (["/bin/sh", "-c", f"kill -0 $(cat {FILE})"], []),
        (["/bin/sh", "-c", f"timeout 5 grep Gres {FILE}"], []),
        (["/bin/sh", "-c", "rm -f /nope/lock"], []),
    ],
)
def test_what_a_command_executes(argv: list[str], also: list[str]) -> None:
    assert of_command(argv) == [argv[0], *also]


def test_what_a_script_executes(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.write_text("#!/nope/sh -e\n")
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\n# /nope/comment\n{inner} --now\nx=/nope/data\n")
    assert of_command([str(script)]) == [str(script), "/bin/sh", str(inner), "/nope/sh"]


@needs_root
def test_a_command_that_others_can_change(tmp_path: Path) -> None:
    tool, script = tmp_path / "tool", tmp_path / "script"
    tool.write_text("#!/bin/sh\n")
    script.write_text(f"#!/bin/sh\n{tool}\n")
    for path in (tool, script):
        path.chmod(0o755)
    trust.command([str(script)])
    os.chown(tool, OTHER, OTHER)
    with pytest.raises(PermissionError) as raised:
        trust.command([str(script)])
    assert raised.value.filename == str(tool)
    with pytest.raises(FileNotFoundError):
        trust.command(["/nope/tool"])


@needs_root
def test_slurms_commands_that_others_can_change(tmp_path: Path) -> None:
    place = tmp_path / "bin"
    place.mkdir(mode=0o755)
    (place / "scontrol").touch()
    assert trust.slurm_path(f"{place}:/bin") == (f"{place}:/bin", [])
    os.chown(place / "scontrol", OTHER, OTHER)
    path, (hole,) = trust.slurm_path(f"{place}:/bin")
    assert path == "/bin" and hole.place == f"{place}/scontrol"


def environment(top: Path, config: str = "") -> Path:
    (top / "bin").mkdir(parents=True)
    (top / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    python = top / "bin" / "python3.11"
    python.write_bytes(b"\x7fELF")
    if config:
        (top / "pyvenv.cfg").write_text(config)
    else:
        (top / "lib" / "python3.11" / "os.py").touch()
    return python


def test_the_files_of_an_interpreter(tmp_path: Path) -> None:
    base = environment(tmp_path / "base")
    python = environment(tmp_path / "venv", f"HOME = {base.parent}\n")
    own = of_python(str(python))
    site = f"{tmp_path}/venv/lib/python3.11/site-packages"
    assert own.library == (f"{tmp_path}/base/lib/python3.11",) and own.sites == (site,)
    (tmp_path / "named").mkdir()
    Path(site, "x.pth").write_text(f"import os\n{tmp_path}/named\n{tmp_path}/to-come\n")
    (tmp_path / "venv" / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = true\n"
    )
    own = of_python(str(python))
    theirs = f"{tmp_path}/base/lib/python3.11/site-packages"
    assert own.sites == (site, f"{tmp_path}/named", theirs)
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(OSError, match="name the interpreter itself"):
        of_python(str(script))


@needs_root
def test_a_script_that_names_what_does_not_answer_takes_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look hung in the gate's worker, which drained the node for a file server's outage."""
    script = tmp_path / "check"
    script.write_text("#!/bin/sh\n/mnt/away/tool\n")
    script.chmod(0o755)
    system = LiveSystem(settings.defaults(()), context("sweep", {"SLURMD_NODENAME": "n1"}))
    monkeypatch.setattr(trust, "to_come", lambda *of: threading.Event().wait())
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="could not be seen"):
        system.command([str(script)], 0.5)
    assert time.monotonic() - began < 5
