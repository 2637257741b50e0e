"""Run one of Slurm's commands: ping slurmctld first, keep the deadline, classify the error.

A call that fails raises SlurmError. With slurmctld down a command blocks 9-18 s by itself.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from robust_slurm.slurm.errors import AMBIGUOUS, SlurmError, classify
from robust_slurm.slurm.run import Completed, Runner, query_env, run_command
from robust_slurm.text import one_line

_RETRY_PAUSE_S = 0.2
_PING_S = 0.8
_PROBE = ("scontrol", "show", "partition")
_PROBE_S = 0.7  # for a protocol error: 0.01 to 0.45 s with three releases on a busy machine
_SLOWER = 10  # times as long as the ping took, which the probe may take
_LEAST_S = 0.1  # for a command that only explains an error
_VERSION = ("scontrol", "version")  # which needs no slurmctld
_HEARD_S = 1.0  # after an answer, slurmctld is taken to be up for so long


class SlurmCommands:
    """Runs Slurm's commands. Use it as ``Slurm``, which knows what to ask and to order."""

    def __init__(
        self,
        runner: Runner = run_command,
        deadline_s: float = 10.0,
        environ: Mapping[str, str] | None = None,
        *,
        ping_first: bool = False,
        why: str = "",
    ) -> None:
        """``ping_first``: raise ``unreachable`` at once where no slurmctld answers, instead of
        waiting for it until the deadline. ``why``: the reason for this backend, for people."""
        self._runner = runner
        self._deadline_s = deadline_s
        self._ping_first = ping_first
        self._heard = -_HEARD_S  # when a slurmctld answered last, in monotonic seconds
        self._why = why
        self._environ = dict(os.environ if environ is None else environ)
        self._query_env = query_env(self._environ)
        self._names: dict[int, str] = {}  # of jobs that were asked for theirs

    def ping(self) -> bool:
        """True if a slurmctld, primary or backup, answers."""
        return self._up(self._until())

    def _up(self, until: float) -> bool:
        try:
            return self._ping(until - time.monotonic())
        except SlurmError:
            return False

    def _ping(self, deadline_s: float) -> bool:
        done = self._runner(("scontrol", "ping"), deadline_s, None, self._query_env, None)
        up = " is UP" in done.stdout
        if up:
            self._heard = time.monotonic()
        return up

    def backend(self) -> tuple[str, str]:
        """Name the way that is used, "commands" or "pyslurm", and why."""
        return "commands", self._why

    def close(self) -> None:
        """End what was started to reach Slurm."""

    def version(self) -> tuple[int, int]:
        """Release of the commands on this machine, e.g. (22, 5). The server's is in config()."""
        return self._version(self._until())

    def _version(self, until: float) -> tuple[int, int]:
        argv = _VERSION
        match = re.search(r"(\d+)\.(\d+)", self._run(argv, until=until, retry=True).stdout)
        if match is None:
            raise SlurmError("other", argv, "it printed no version")
        return int(match[1]), int(match[2])

    # ---- inside

    def _until(self) -> float:
        return time.monotonic() + self._deadline_s

    def _run(
        self,
        argv: Sequence[str],
        *,
        until: float | None = None,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        retry: bool = False,
        allow: Collection[str] = (),
    ) -> Completed:
        """Run to the end or the deadline; with ``retry`` once more if time is left for it.

        A stray refusal is no answer: with ``retry`` the command is repeated until the deadline.

        ``until`` (monotonic seconds) is the deadline of a call that makes several commands.
        """
        until = self._until() if until is None else until
        asks = tuple(argv) != _VERSION
        if asks:
            self._sure(argv, until)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise SlurmError("timeout", argv, f"not asked: {self._deadline_s:g} s have passed")
            done = self._runner(argv, left, input, self._query_env if env is None else env, cwd)
            error = classify(argv, done.returncode, done.stdout, done.stderr)
            if error is None or error.kind in allow:
                self._heard = time.monotonic() if asks else self._heard
                return done
            if error.kind == "version":
                raise self._skewed(error, until)
            soon = time.monotonic() + _PING_S
            if AMBIGUOUS in error.message.lower() and not self._up(max(until, soon)):
                raise SlurmError("unreachable", argv, "no slurmctld answers")
            left = until - time.monotonic()
            if not retry or left < 2 * _RETRY_PAUSE_S:
                raise error
            if error.kind == "timeout":
                retry = False
            elif not error.stray:
                raise error
            time.sleep(_RETRY_PAUSE_S)

    def _sure(self, argv: Sequence[str], until: float) -> None:
        """Raise ``unreachable`` if all slurmctlds are known to be down.

        A slurmctld that is only slow, or whose host is silent, is left to the deadline. scontrol
        also calls a slurmctld of another release DOWN; a question to it fails with ``version``.
        """
        if not self._ping_first or time.monotonic() - self._heard < _HEARD_S:
            return
        began = time.monotonic()
        try:
            up = self._ping(max(_LEAST_S, min(_PING_S, until - began)))
        except SlurmError as error:
            if error.kind == "timeout":
                return
            raise
        if up:
            return
        now = time.monotonic()
        limit = max(_LEAST_S, min(max(_PROBE_S, _SLOWER * (now - began)), until - now))
        try:
            done = self._runner(_PROBE, limit, None, self._query_env, None)
            found = classify(argv, done.returncode, done.stdout, done.stderr)
        except SlurmError:  # with slurmctld down it retries for 9 s
            found = None
        else:
            if found is None:  # it has come up, or does not take this ping
                self._heard = time.monotonic()
                return
        if found is not None and found.kind == "version":
            raise self._skewed(found, until)
        raise SlurmError("unreachable", argv, "no slurmctld answers")

    def _skewed(self, error: SlurmError, until: float) -> SlurmError:
        """Name our own release: neither side of a protocol error does."""
        left = max(_LEAST_S, min(_PING_S, until - time.monotonic()))
        try:
            done = self._runner(_VERSION, left, None, self._query_env, None)
        except SlurmError:
            return error
        ours = one_line(done.stdout, 40)
        return SlurmError("version", error.command, f"{error.message} (commands: {ours})")
