"""Keeps a healthy rank's process over a restart: it waits, then joins the next epoch (``rejoin``).

A rank is asked only if it is the slot's own process and runs inside ``robust_slurm.resilient``. A
rank that does not answer in time is ended, as if it had not been asked.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from robust_slurm.frames.json_lines import peer
from robust_slurm.layout import beside, record_path
from robust_slurm.rejoin.offer import GOING, PAUSE, READY, SUFFIX
from srun_wrapper.agent.loop import Loop, Timer
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.head_start import head_start
from srun_wrapper.command.rank_env import STALE
from srun_wrapper.protocol.messages import RankStart, Start

TAKEN = 5.0  # s for a waiting rank to confirm the environment of the next epoch
SENT = 0.2  # s for the socket to take that environment; its buffer has room for far more
_STOPPED = "tT"  # states of /proc: it cannot answer


class Rejoining:
    """Asks the rank of one slot to wait, and to go on. ``asked`` is called with True if it waits,
    ``going`` with True if it goes on in the next epoch."""

    def __init__(self, loop: Loop, run_dir: Path, local: int) -> None:
        self._loop = loop
        self._run_dir = run_dir
        self._local = local
        self._line: socket.socket | None = None
        self._timer: Timer | None = None
        self._done: Callable[[bool], None] | None = None
        self._wanted = b""
        self._begun: tuple[Start, RankStart] | None = None
        self._since = 0.0
        self._wait = 0.0
        self.held = False
        """The rank waits."""
        self.seconds = 0.0
        """Seconds from the request until the rank answered that it waits."""

    def began(self, order: Start, rank: RankStart) -> None:
        """Note that the slot's rank belongs to this epoch now, whichever process it is."""
        self.drop()
        self._begun = (order, rank)

    @property
    def asking(self) -> bool:
        """True while it is not known whether the rank will wait."""
        return self._done is not None and self._wanted == READY

    def ask(self, rank: tuple[int, int], limit: float, asked: Callable[[bool], None]) -> bool:
        """Ask the rank (pid, epoch) to wait; False if it cannot be asked.

        ``limit``: s for it to answer.
        """
        process, epoch = rank
        if limit <= 0 or process_tree.usage([process]).state in _STOPPED:
            return False
        beat = record_path(str(self._run_dir), epoch, self._local)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(SENT)
        try:
            line.connect(beside(beat, SUFFIX))
            if peer(line)[0] != process:  # below a launcher, which would see it end
                raise OSError
            line.sendall(PAUSE)
        except OSError:  # it is not in resilient(), or is gone
            line.close()
            return False
        self._since = time.monotonic()
        self._line = line
        self._await(READY, limit, asked)
        return True

    def part(self, order: Start) -> RankStart | None:
        """Return the slot's part of an epoch; None if the waiting rank cannot take it."""
        if not self.held or not order.rejoin or self._begun is None:
            return None
        old, was = self._begun
        for rank in order.ranks:
            same = rank.local == self._local and rank.rank == was.rank
            size = order.env.get("WORLD_SIZE") == old.env.get("WORLD_SIZE")
            if same and size and order.code == old.code and "ROBUST_REPLAY" not in order.env:
                self._wait = head_start(rank)
                return rank
        return None

    def send(self, env: Mapping[str, str] | None, going: Callable[[bool], None]) -> bool:
        """Give the rank its environment; False if that is not possible."""
        line, self.held = self._line, False
        if line is None or env is None:
            return False
        unset = [name for name in STALE if name not in env]
        order = {"set": dict(env), "unset": unset, "wait": self._wait}
        text = json.dumps(order, separators=(",", ":"))
        try:
            line.sendall(text.encode() + b"\n")
        except OSError:
            return False
        self._await(GOING, TAKEN, going)
        return True

    def drop(self) -> None:
        """Close the connection to the rank; a rank that waits then ends by itself."""
        self._done, self.held = None, False
        if self._timer is not None:
            self._timer.cancel()
        if self._line is not None:
            self._loop.forget(self._line)
            self._line.close()
            self._line = None

    def _await(self, wanted: bytes, limit: float, done: Callable[[bool], None]) -> None:
        assert self._line is not None
        self._wanted, self._done = wanted, done
        self._loop.watch(self._line, self._read, write=False)
        self._timer = self._loop.later(limit, lambda: self._over(False))

    def _read(self, _mask: int) -> None:
        line, answer = self._line, b""
        if line is not None:
            with contextlib.suppress(OSError):
                answer = line.recv(1)
        self._over(answer == self._wanted)

    def _over(self, good: bool) -> None:
        done, self._done = self._done, None
        if self._timer is not None:
            self._timer.cancel()
        if done is None:
            self.drop()  # the rank ended while it waited
            return
        if good and self._wanted == READY:
            self.held, self.seconds = True, time.monotonic() - self._since
        else:
            self.drop()
        done(good)
