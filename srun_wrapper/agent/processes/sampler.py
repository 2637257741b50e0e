"""Sample a rank's current activity: CPU, I/O, process state and Python stacks.

Only asked for when steps stop coming, so it may cost a little: two py-spy dumps of the rank's
Python process (by the same user, the rank's ancestor, so no privilege is needed).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.messages import Sample

DUMP_DEADLINE = 5.0
DEPTH = 12


def py_spy() -> str | None:
    """Path of py-spy: beside the running interpreter, else on PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def main_stack(dump: str) -> tuple[str, ...]:
    """Frames of the main thread of ``py-spy dump --json``, innermost first.

    Empty when the dump is not understood or has no thread.
    """
    try:
        threads = json.loads(dump)
        thread = next((t for t in threads if t.get("thread_name") == "MainThread"), threads[0])
        return tuple(
            f"{f['name']} ({Path(str(f['filename'])).name}:{f['line']})"
            for f in thread["frames"][:DEPTH]
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return ()


def _dump(pid: int) -> tuple[str, ...]:
    tool = py_spy()
    if tool is None or pid <= 0:
        return ()
    # A file, not a pipe: the loop's child reaper may collect py-spy before we do.
    with tempfile.TemporaryFile("w+") as out:
        try:
            child = subprocess.Popen(
                [tool, "dump", "--json", "--nonblocking", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            return ()
        try:
            child.wait(DUMP_DEADLINE)
        except subprocess.TimeoutExpired:
            child.kill()
            return ()
        out.seek(0)
        return main_stack(out.read())


def python_process(pid: int) -> int:
    """The process to look into: the rank itself, or below a shell script its first python."""
    for candidate in [pid, *process_tree.descendants(pid)]:
        try:
            if "python" in Path(f"/proc/{candidate}/exe").readlink().name:
                return candidate
        except OSError:
            continue
    return pid


class Sampler:
    """Takes one sample over a window without holding up the loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def sample(self, local: int, pid: int, window: float, done: Callable[[Sample], None]) -> None:
        if pid <= 0:
            done(Sample(local, "", 0.0, 0))
            return
        result: list[Sample] = []

        def work() -> None:
            result.append(_sample(local, pid, window))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def check() -> None:
            if result:
                done(result[0])
            else:
                self._loop.later(0.05, check)

        self._loop.later(window, check)


def _sample(local: int, pid: int, window: float) -> Sample:
    tree = [pid, *process_tree.descendants(pid)]
    before = process_tree.usage(tree)
    if before.state == "T":
        return Sample(local, "T", 0.0, 0)  # a stopped process answers no debugger
    target = python_process(pid)
    waiting = threading.Event()
    first = _dump(target)
    before = process_tree.usage(tree)
    waiting.wait(window)
    after = process_tree.usage(tree)
    second = _dump(target)
    return Sample(
        local,
        after.state,
        max(0.0, after.cpu - before.cpu),
        max(0, after.io - before.io),
        second or first,
        bool(first and second and first != second),
    )
