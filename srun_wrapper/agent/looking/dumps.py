"""Stacks of processes by py-spy, all at once and within a deadline."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from robust_slurm import commands
from robust_slurm.text import one_line
from srun_wrapper.protocol.looking_messages import ThreadStack

DEADLINE = 2.0  # s for all dumps of a slot
TOGETHER = 8  # py-spy processes of a slot at a time
DEPTH = 40  # frames of a thread, the innermost
THREADS = 32  # of a process
WORD = 120  # characters of a frame, or of a thread's name
LONGEST = 8 << 20  # bytes of a dump that are read
MAIN = "main"
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
NOT_INSTALLED = "py-spy is not installed beside robust-task"


@dataclass(frozen=True, slots=True)
class Dump:
    """The stacks of one process, the main thread first, or why there are none."""

    stacks: tuple[ThreadStack, ...] = ()
    failed: str = ""


def py_spy() -> str | None:
    """Path of py-spy: our installation's, else on PATH."""
    return commands.own_program("py-spy") or shutil.which("py-spy")


def stacks(dump: str, pid: int) -> tuple[ThreadStack, ...]:
    """Return the threads of ``py-spy dump --json``, the main one first; () if it is no dump."""
    try:
        threads = json.loads(dump)
        ordered = sorted(threads, key=lambda thread: not _is_main(thread, pid))
        if not any(_is_main(thread, pid) for thread in threads):  # as in another pid namespace
            ordered = sorted(threads, key=lambda t: t.get("thread_name") != "MainThread")
        return tuple(
            ThreadStack(
                MAIN if n == 0 else one_line(str(thread.get("thread_name") or ""), WORD),
                tuple(_frame(frame) for frame in thread["frames"][:DEPTH]),
            )
            for n, thread in enumerate(ordered[:THREADS])
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return ()


def _is_main(thread: dict[str, Any], pid: int) -> bool:
    return thread.get("os_thread_id") == pid


def _frame(frame: dict[str, Any]) -> str:
    where = frame.get("short_filename") or Path(str(frame["filename"])).name
    return frame_text(str(frame["name"]), str(where), int(frame["line"]))


def frame_text(function: str, file: str, line: int) -> str:
    """Return "function (file:line)", cleaned and bounded."""
    tail = file[-WORD // 2 :]
    return f"{one_line(function, WORD // 2)} ({one_line(tail, WORD // 2)}:{line})"


def why(error: str) -> str:
    """Return why py-spy gave no stack, from what it wrote to stderr."""
    if "ermission" in error or "not permitted" in error:
        try:
            scope = SCOPE.read_text().strip()
        except OSError:
            scope = "0"
        cause = f"kernel.yama.ptrace_scope = {scope}" if scope not in ("", "0") else "no permission"
        return f"py-spy was refused: {cause}"
    lines = [line for line in error.splitlines() if line.startswith(("Error", "    "))]
    return f"py-spy found no stack: {one_line(lines[0] if lines else error, WORD)}"


class _Running:
    def __init__(self, tool: str, pid: int) -> None:
        # Files, not pipes: the loop's child reaper may collect py-spy before we do.
        self.pid = pid
        self.out: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.err: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [tool, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=self.out,
            stderr=self.err,
        )

    def result(self) -> Dump:
        if self.process.poll() is None:
            self.process.kill()
            return Dump(failed=f"py-spy had no answer within {DEADLINE:g} s")
        found = stacks(self._read(self.out), self.pid)
        return Dump(found) if found else Dump(failed=why(self._read(self.err)))

    @staticmethod
    def _read(file: IO[bytes]) -> str:
        file.seek(0)
        return file.read(LONGEST).decode(errors="replace")

    def close(self) -> None:
        self.out.close()
        self.err.close()


def dump_all(pids: Sequence[int]) -> dict[int, Dump]:
    """Dump these processes; each has a ``Dump`` by the deadline."""
    tool = py_spy()
    if tool is None:
        return dict.fromkeys(pids, Dump(failed=NOT_INSTALLED))
    until = time.monotonic() + DEADLINE
    waiting, running, found = list(reversed(pids)), list[_Running](), dict[int, Dump]()
    while waiting or running:
        late = time.monotonic() >= until
        while waiting and len(running) < TOGETHER and not late:
            pid = waiting.pop()
            try:
                running.append(_Running(tool, pid))
            except OSError as err:
                found[pid] = Dump(failed=f"py-spy cannot be started: {err.strerror}")
        for each in list(running):
            if late or each.process.poll() is not None:
                found[each.pid] = each.result()
                each.close()
                running.remove(each)
        if late:
            late_ones = dict.fromkeys(waiting, Dump(failed=f"not looked at within {DEADLINE:g} s"))
            return found | late_ones
        time.sleep(0.005)
    return found
