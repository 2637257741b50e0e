"""A rank's imports at its first step: their file, their message, and checks before their use."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from srun_wrapper.agent.loop import Loop

LOOK = 0.5  # s between two looks for what a rank has learnt
_MOST = 4 << 20  # bytes of a rank's file


class Learnt(msgspec.Struct):
    """A rank's own record at its first step (``robust_slurm.auto.learnt``)."""

    pid: int
    words: tuple[str, ...]
    environ: dict[str, str | None]
    modules: tuple[tuple[str, str], ...]
    standby: bool = False
    store: bool = False  # see robust_slurm.auto.listening


def read_learnt(path: Path) -> Learnt | None:
    """Read a rank's record; None if it is not written yet or is not valid."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return msgspec.json.decode(file.read(_MOST), type=Learnt)
    except (OSError, ValueError, RecursionError):  # no UTF-8, or nested too deep
        return None


def pack(learnt: Learnt) -> bytes:
    """Encode a record for a message."""
    return zlib.compress(msgspec.json.encode(learnt), 1)


def unpack(data: bytes) -> Learnt:
    """Unpack what was learnt. Raises ValueError."""
    try:
        return msgspec.json.decode(zlib.decompressobj().decompress(data, _MOST), type=Learnt)
    except (zlib.error, ValueError, RecursionError) as err:
        raise ValueError(f"invalid list of imports: {err}") from None


def is_interpreter(words: Sequence[str], command: Sequence[str], env: Mapping[str, str]) -> bool:
    """True if a process with the command line ``words`` is ``command`` itself and nothing more.

    Either they are equal, or ``command`` is a script that the kernel gives to a Python by its
    first line.
    """
    if not words or not Path(words[0]).name.startswith("python"):
        return False
    if list(words) == list(command):
        return True
    count = len(command) - 1
    script = shutil.which(command[0], path=env.get("PATH", os.defpath)) or command[0]
    return (
        len(words) - len(command) in (1, 2)
        and list(words[len(words) - count :]) == list(command[1:])
        and os.path.realpath(words[-count - 1]) == os.path.realpath(script)
        and _first_line(script).startswith(b"#!")
        and b"python" in _first_line(script)
    )


def _first_line(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.readline(256)
    except OSError:
        return b""


class ImportWatch:
    """Waits until a rank has recorded its imports; watches one rank at a time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._turn = 0

    def begin(
        self,
        paths: Sequence[Path],
        pid: int,
        command: Sequence[str],
        env: Mapping[str, str],
        found: Callable[[Learnt], None],
    ) -> None:
        """Call ``found`` once rank ``pid`` has written one of ``paths``, if it is ``command``."""
        self._turn += 1
        turn = self._turn

        def poll() -> None:
            if turn != self._turn:
                return
            records = (learnt for learnt in map(read_learnt, paths) if learnt and learnt.pid == pid)
            learnt = next(records, None)
            if learnt is None:
                self._loop.later(LOOK, poll)
                return
            words = learnt.words  # in a thread, as ``is_interpreter`` reads the user's files
            self._loop.run_in_thread(
                lambda: is_interpreter(words, command, env),
                lambda sure: decided(sure, learnt),
                otherwise=False,
            )

        def decided(sure: bool, learnt: Learnt) -> None:
            if sure and turn == self._turn:
                found(learnt)

        self._loop.later(LOOK, poll)

    def end(self) -> None:
        self._turn += 1
