"""Other vendors' programs: find one, and run it with a hard time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from health.children.child import where_it_hangs
from health.node import trust

FIXED = ("/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/sbin", "/usr/local/bin")
_GRACE_S = 5.0  # from SIGTERM to SIGKILL: dcgmi needs it to stop its diagnostic in the host engine
_DIES_S = 2.0  # from SIGKILL to the end; longer only where the driver holds it


class ToolRun(NamedTuple):
    """The result of a program. ``code`` is -N after signal N, None: it could not be killed.

    ``cut`` says why it was ended before its time, empty where it ended by itself.
    """

    code: int | None
    out: str
    err: str
    cut: str = ""


def find(name: str, directories: Sequence[str] = ()) -> str:
    """Return the absolute path of a program; empty: it is not installed.

    Looks in ``directories`` first, then where a distribution puts it. Root ignores PATH, which a
    user's environment may have set, and accepts only files that no other user can have put there.
    """
    asked = [] if os.geteuid() == 0 else os.environ.get("PATH", "").split(":")
    for directory in (*directories, *asked, *FIXED):
        path = Path(directory) / name
        found = directory.startswith("/") and path.is_file() and os.access(path, os.X_OK)
        if not found:
            continue
        try:
            if os.geteuid() == 0:
                trust.command([str(path)])
        except OSError:  # somebody else's
            continue
        return str(path)
    return ""


def run(argv: Sequence[str], limit_s: float, env: Mapping[str, str]) -> ToolRun:
    """Run a program in its own session for at most ``limit_s`` plus _DIES_S, whatever it does.

    OSError: it could not be started.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        list(argv),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    grace = min(_GRACE_S, limit_s / 4)
    cut = ""
    for number, wait_s in (
        (0, limit_s - grace),
        (signal.SIGTERM, grace),
        (signal.SIGKILL, _DIES_S),
    ):
        if number:
            cut = cut or _why(process.pid, time.monotonic() - began)
            _kill(process.pid, number)
        try:
            out, err = process.communicate(timeout=max(0.0, wait_s))
        except subprocess.TimeoutExpired as late:
            out, err = late.output or b"", late.stderr or b""
        except BaseException:  # Ctrl-C: nothing of it stays
            _kill(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the driver
                process.wait(_DIES_S)
            raise
        else:
            return ToolRun(process.returncode, _text(out), _text(err), cut)
    return ToolRun(None, _text(out), _text(err), f"{cut}; it cannot be killed")


def _why(pid: int, seconds: float) -> str:
    where = where_it_hangs(pid)
    return f"did not end within {seconds:.0f} s" + (f" ({where})" if where else "")


def _kill(pid: int, number: int) -> None:
    """Signal the whole group; its id is not reused as long as its leader was not waited for."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
