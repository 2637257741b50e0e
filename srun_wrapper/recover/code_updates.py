"""Changes of the job's code while it runs: requests, the version in force, the way back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import msgspec

from robust_slurm.state_dir.ledger import JobLedger
from robust_slurm.text import one_line
from srun_wrapper.code import prune
from srun_wrapper.code.deployment import REQUESTS, Deployment
from srun_wrapper.code.listing import CodeError
from srun_wrapper.code.requests import Follower, Request
from srun_wrapper.code.versions import Book, Change
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.code import Code

T = TypeVar("T")
P = ParamSpec("P")
_ROOT = "robust-srun"
_NO_CHANGE = cast("Change | None", None)
_log = logging.getLogger("robust-srun.code")


def _guarded(default: T) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have an exception in a method logged and ``default`` returned, so that the job goes on."""

    def guard(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def guarded(*args: P.args, **named: P.kwargs) -> T:
            try:
                return method(*args, **named)
            except Exception:  # noqa: BLE001 - whatever it is, the training goes on
                _log.exception("updates of the code, %s", method.__name__)
                return default

        return guarded

    return guard


class CodeUpdates:
    """Keeps the book of a job's code. Without a deployment there is nothing to change."""

    def __init__(
        self,
        state: JobState,
        deployment: Deployment | None,
        ledger: JobLedger,
        journal: Journal,
    ) -> None:
        self._state = state
        self._deployment = deployment
        self._ledger = ledger
        self._journal = journal
        self._follower: Follower | None = None
        self._codes: dict[str, Code] = {}
        if deployment is not None:
            state.code = deployment.first
            self._keep(state.code)

    @_guarded(None)
    def begin(self) -> None:
        """Follow requests from now on. Called in the loop."""
        deployment, loop = self._deployment, asyncio.get_running_loop()
        if deployment is None:
            return

        def got(request: Request, offset: int) -> None:
            code, why = self._prepared(deployment, request.change.version)
            with contextlib.suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(self._received, request, offset, code, why)

        def known() -> None:
            for name in deployment.book.progressed:
                self._keep(self._prepared(deployment, name)[0])

        threading.Thread(target=known, daemon=True).start()
        store = Path(deployment.book.store)
        prune.begin(self._state.config, store, deployment.records)
        path = deployment.records / REQUESTS
        self._follower = Follower(path, deployment.book.read, got, store)

    @_guarded(None)
    def close(self) -> None:
        """End with the job's step; a requeued job goes on with the book."""
        if self._follower is not None and self._book is not None:
            self._follower.close()
            self._book.running = False
            self._save(self._book)

    # -- requests

    def _prepared(self, deployment: Deployment, version: str) -> tuple[Code | None, str]:
        """Look the version up on the shared file system, beside the loop."""
        try:
            return deployment.code(version), ""
        except (CodeError, OSError, ValueError) as err:  # ValueError: a name that is no path
            return None, str(err)
        except Exception as err:  # noqa: BLE001 - or no later request would be heard
            _log.exception("code %s", version)
            return None, f"internal error: {type(err).__name__}: {err}"

    def _keep(self, code: Code | None) -> None:
        if code is not None:
            self._codes[code.version] = code

    @property
    def _book(self) -> Book | None:
        return self._deployment.book if self._deployment is not None else None

    @_guarded(None)
    def _received(self, request: Request, offset: int, code: Code | None, why: str) -> None:
        """Take a request in, in the loop."""
        book, change = self._book, request.change
        assert book is not None
        book.read = offset
        self._keep(code)
        change.who, change.host = one_line(change.who, 64), one_line(change.host, 64)
        change.why = one_line(change.why, 500)
        if request.action == "cancel":
            cancelled = book.cancel(change.who)
            what = f"code {cancelled.version} is not applied" if cancelled else "no update waits"
            say(f"{change.who} on {change.host} cancels: {what}")
        else:
            if request.version is not None and code is not None:
                book.add(request.version)
            refused = book.request(change, why)
            if refused:
                say(one_line(f"code {change.version} is refused: {change.outcome}", 500))
            else:
                self._announce(change)
        self._note(change)
        self._state.changed.set()

    def _announce(self, change: Change) -> None:
        when = "at the next recovery, in 24 h at most" if change.kind == "lazy" else "now"
        why = f" ({change.why})" if change.why else ""
        say(f"{change.who} on {change.host} requests code {change.version} {when}{why}")

    def _note(self, change: Change) -> None:
        """Record a change, and write the book."""
        book = self._book
        assert book is not None
        words = {"kind": change.kind, "version": change.version, "who": change.who}
        self._journal.event(
            "code", id=change.id, **words, state=change.state, outcome=change.outcome
        )
        self._save(book)

    def _save(self, book: Book) -> None:
        self._ledger.code(msgspec.to_builtins(book))

    # -- what the job's life asks

    @_guarded(_NO_CHANGE)
    def due(self) -> Change | None:
        """Return the change for which the running ranks are to be restarted now."""
        book = self._book
        change = book.due(time.time()) if book is not None else None
        return change if change is not None and change.version in self._codes else None

    def is_due(self) -> bool:
        """True if there is such a change."""
        return self.due() is not None

    @_guarded("")
    def other(self) -> str:
        """Return, in words, the other code that the ranks can start with if the program failed."""
        book = self._book
        if book is None:
            return ""
        if (change := self._next()) is not None:
            return f"code {change.version}, which waits"
        target = self._target()
        return f"code {target}, the last version that made progress" if target else ""

    @_guarded(False)
    def waits(self) -> bool:
        """True if the next start of the ranks has other code."""
        return self._next() is not None

    def _next(self) -> Change | None:
        change = self._book.waiting() if self._book is not None else None
        return change if change is not None and change.version in self._codes else None

    def _target(self) -> str:
        assert self._book is not None
        target = self._book.rollback_target(time.time(), self._state.config.code_trial)
        return target if target in self._codes else ""

    @_guarded(None)
    def before_start(self, failed: str) -> None:
        """Apply the change that waits, or roll back, as ranks are about to start.

        ``failed``: why the program itself is to blame for the restart; "" if it is not.
        """
        book = self._book
        if book is None:
            return
        try:
            self._change(book, failed)
        except Exception as err:
            # A change that still waited would be due at once, and restart the ranks for ever.
            if (change := book.waiting()) is not None:
                change.state = "refused"
                change.outcome = f"internal error: {type(err).__name__}: {err}"
                say(f"code {change.version} is refused: {change.outcome}")
                self._note(change)
            raise

    def _change(self, book: Book, failed: str) -> None:
        now = time.time()
        if (change := self._next()) is not None:
            book.apply(change, now)
            self._state.code = self._codes[change.version]
            self._note(change)
        elif failed and (target := self._target()):
            bad = book.in_force()
            assert bad is not None
            who = (_ROOT, self._state.own_node)
            back = Change(secrets.token_hex(4), "automatic", target, *who, failed, now)
            after = now - bad.applied
            book.roll_back(back, f"failed {after:.0f} s after it was applied: {failed}", now)
            self._state.code = self._codes[target]
            say(
                f"code {bad.version} of {bad.who} failed {after:.0f} s after the update: rolled "
                f"back to code {target}, the last version that made progress: {failed}"
            )
            self._note(bad)
            self._note(back)

    @_guarded(None)
    def resumed(self) -> None:
        """Note that the restart succeeded: all ranks are past a step, or have lived long enough."""
        change = self._book.in_force() if self._book is not None else None
        if change is None or change.seconds or change.kind == "start":
            return
        change.seconds = round(max(0.001, time.time() - change.requested), 3)
        change.outcome = f"all ranks past a step {change.seconds:.2f} s after the request"
        self._note(change)

    # -- a watch

    def look(self, _now: float) -> None:
        """See whether the version in force makes progress, and whether a change is due."""
        state, book = self._state, self._book
        if book is None:
            return
        running = not state.failures and not state.stopped() and state.world.all_stepped()
        if running and state.progress.since_failure() and book.progress():
            change = book.in_force()
            if change is not None:
                change.outcome = change.outcome or "made progress"
                self._note(change)
        if self.due() is not None:
            state.changed.set()
