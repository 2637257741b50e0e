"""Requests to Slurm that outlast an absence of slurmctld or munge: one mechanism for all of them.

A request is repeated only while Slurm has not judged it (``SlurmError.away``); a refusal is raised
at once. All requests of a process share one ``Outage``, so an absence is reported once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from robust_slurm.slurm import Slurm, SlurmError
from srun_wrapper.run_in_thread import run_in_thread

T = TypeVar("T")
PAUSES = (0.5, 1.0, 2.0, 4.0)  # s before the next try; the last one repeats
REPORT_EVERY = 60.0  # s
LONGEST = 180.0  # s for one request of several commands, each of which has its own deadline
BUSY_TRIES = 30
BUSY_PAUSE = 10.0  # s between tries while Slurm says that the job cannot be changed now
LOOK = 0.2  # s between looks at whether the request is still wanted


class Outage:
    """One absence of Slurm (pure). Times are monotonic seconds; ``limit`` bounds the absence."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.count = 0  # absences so far, this one included
        self._since: float | None = None
        self._tries = 0
        self._reported = 0.0

    def failed(self, what: str, error: SlurmError, began: float, now: float) -> tuple[float, str]:
        """Record a request made at ``began`` and not answered by ``now``.

        Returns the pause before the next try in seconds and the line to print ("": none). Raises
        the error once the limit is over.
        """
        if self._since is None:
            self.count += 1
            self._since, self._tries, self._reported = began, 0, now
            text = (
                f"Slurm does not answer ({error.message}): waiting up to {minutes(self.limit)} "
                f"to {what}"
            )
        elif now - self._since >= self.limit:
            raise error
        elif now - self._reported >= REPORT_EVERY:
            self._reported = now
            text = (
                f"Slurm has not answered for {minutes(now - self._since)}: still waiting to {what}"
            )
        else:
            text = ""
        pause = PAUSES[min(self._tries, len(PAUSES) - 1)]
        self._tries += 1
        return min(pause, max(0.0, self._since + self.limit - now)), text

    def answered(self, now: float) -> str:
        """Record that Slurm has answered; returns the line to print ("": it was not away)."""
        if self._since is None:
            return ""
        away, self._since = now - self._since, None
        return f"Slurm answers again after {minutes(away)}"


def minutes(seconds: float) -> str:
    """A length of time in words: seconds up to two minutes, then minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


class SlurmWait:
    """Makes requests beside the event loop. ``over``: nobody wants an answer any more."""

    def __init__(
        self, limit: float, over: Callable[[], bool], report: Callable[[str], None]
    ) -> None:
        self.outage = Outage(limit)
        self._over = over
        self._report = report

    async def call(
        self,
        what: str,
        request: Callable[[], T],
        over: Callable[[], bool] | None = None,
        whole: bool = False,
    ) -> T:
        """The answer to ``request()``, repeated while Slurm is away.

        ``what``: the purpose, for the message ("requeue the job"). ``over``: a reason to stop
        waiting, instead of the general one; with ``whole`` it counts only between two tries, for
        orders that must not be cut short. Raises SlurmError: a refusal, or Slurm was away for the
        limit, or the request was abandoned (the last error, ``timeout`` if there was none).
        """
        over = over or self._over
        while True:
            began = time.monotonic()
            try:
                answer = await self._once(request, None if whole else over)
            except SlurmError as error:
                if not error.away:
                    self._answered()
                    raise
                if over():
                    raise
                pause, text = self.outage.failed(what, error, began, time.monotonic())
            else:
                self._answered()
                return answer
            if text:
                self._report(text)
            end = time.monotonic() + pause
            while (left := end - time.monotonic()) > 0 and not over():
                await asyncio.sleep(min(LOOK, left))

    async def insist(self, what: str, order: Callable[[], None]) -> None:
        """Give Slurm an order, again while it cannot be carried out; print a refusal once."""
        for attempt in range(BUSY_TRIES):
            try:
                await self.call(what, order)
                return
            except SlurmError as err:
                if self._over():
                    return
                if attempt == 0:
                    self._report(f"cannot {what}: {err}")
                if err.kind != "conflict":
                    return
            await asyncio.sleep(BUSY_PAUSE)

    async def _once(self, request: Callable[[], T], over: Callable[[], bool] | None) -> T:
        task = asyncio.ensure_future(run_in_thread(request, LONGEST))
        while not task.done():
            await asyncio.wait([task], timeout=LOOK)
            if over is not None and over() and not task.done():
                task.cancel()
                raise SlurmError("timeout", (), "the request was abandoned")
        try:
            return task.result()
        except TimeoutError:
            raise SlurmError("timeout", (), f"no answer in {LONGEST:g} s") from None

    def _answered(self) -> None:
        if text := self.outage.answered(time.monotonic()):
            self._report(text)


class Controller(NamedTuple):
    """Slurm, and the way to outlast its absence."""

    slurm: Slurm
    wait: SlurmWait


def call_waiting(
    outage: Outage, what: str, request: Callable[[], T], report: Callable[[str], None]
) -> T:
    """Call Slurm as ``SlurmWait.call`` does, in a thread that may block."""
    while True:
        began = time.monotonic()
        try:
            answer = request()
        except SlurmError as error:
            if not error.away:
                raise
            pause, text = outage.failed(what, error, began, time.monotonic())
        else:
            text, pause = outage.answered(time.monotonic()), -1.0
        if text:
            report(text)
        if pause < 0:
            return answer
        time.sleep(pause)
