"""Makes the steps that ranks ask for, and some ahead of them, in the data process's main thread."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from robust_slurm.data.errors import DataError, EndOfData, SourceStalled
from robust_slurm.data.service import pages
from robust_slurm.data.service.made_step import MadeStep, shared
from robust_slurm.data.service.ring import StepRing
from robust_slurm.data.service.wanted import Wanted, as_text, digest

if TYPE_CHECKING:
    from collections.abc import Callable

    from robust_slurm.data.service.build import NamedPlan
    from robust_slurm.data.service.ring import Level
    from robust_slurm.data.steps import Steps

AGAIN = 2.0  # s after which a failed step is tried once more, if a rank asks then
WAIT = 1.0  # s between two messages to a rank that waits
TOGETHER = 2.0  # s to wait for the node's other ranks: for a later one all is read anew


class StepFailure(NamedTuple):
    """The reason why there is no step. ``kind``: name of an exception, maybe of ``errors``."""

    kind: str
    why: str
    at: float  # monotonic seconds
    lasts: bool = False  # there will be none


class Producer:
    """Makes steps in ``run``, in the main thread; any thread may call the other methods."""

    def __init__(self, ring: StepRing) -> None:
        self._ring = ring
        self._change = threading.Condition()
        self._wanted: dict[object, Wanted] = {}
        self._shares: set[int] = set()
        self._ranks: set[int] = set()
        self._world = 0, 0  # number of ranks, now and at the job's beginning
        self._other_world = False  # the source is of a world that is over
        self._at = 0  # number of the step that the source makes next
        self._goes_on = False  # the source has to get to where the steps end
        self._complete_at = 0.0  # when the node's ranks are here, or are not waited for any more
        self._failed: dict[str, StepFailure] = {}
        self._expected: dict[int, Wanted] = {}  # by number, as long as nothing is made
        self._plan: NamedPlan | None = None
        self._closed = False
        self._waited, self._waits_since = 0.0, 0.0
        self.broken: StepFailure | None = None
        """The reason why the plan cannot be made: all ranks get it, and the process ends."""

    # -- for connections

    def shares(
        self,
        rank: int,
        world: int,
        original: int,
        beside: int,
        waiting: Callable[[], None],
    ) -> tuple[int, ...] | StepFailure | None:
        """Return a rank's shares; what is made from now on is made for them as well. ``beside``:
        number of ranks of this node. The rest as for ``get``."""
        told = time.monotonic()
        while True:
            with self._change:
                if self.broken is not None:
                    return self.broken
                if self._closed:
                    return None
                if self._plan is not None:
                    try:
                        found = self._plan.shares(rank, world, original)
                    except DataError as err:
                        return _failure(err)
                    self._greet(rank, (world, original), found, beside)
                    return found
                self._change.wait(WAIT)
            told = _say(waiting, told)

    def _greet(
        self, rank: int, world: tuple[int, int], shares: tuple[int, ...], beside: int
    ) -> None:
        if world != self._world and self._ranks:
            if self._world[0] == 1:  # its steps may lack a source that only one rank may hold back
                self._ring.clear()
            self._ranks.clear()
            self._shares.clear()
            self._complete_at = 0.0
            self._other_world = self._goes_on = True
        self._world = world
        if not self._ranks and not self._shares.issuperset(shares):
            self._complete_at = time.monotonic() + TOGETHER
        self._shares.update(shares)
        self._ranks.add(rank)
        if len(self._ranks) >= beside:
            self._complete_at = 0.0
        self._change.notify_all()

    def identity(self) -> dict[str, Any]:
        """Return what must be the same on all nodes, once there are ``shares``."""
        with self._change:
            plan = self._plan
        return plan.identity() if plan is not None else {}  # of a source of the user's, it may last

    def get(
        self, wanted: Wanted, waiting: Callable[[], None]
    ) -> tuple[MadeStep, list[int]] | StepFailure | None:
        """Return the step and descriptors of its memory for these shares, which the caller closes;
        None: the process ends. ``waiting`` is called about every second, and may raise."""
        asked, me = time.monotonic(), object()
        told = asked
        with self._change:
            self._shares.update(wanted.shares)
        try:
            while True:
                with self._change:
                    made = self._ring.find(wanted.name, wanted.shares)
                    if made is not None:
                        self._ring.serve(wanted.name)
                        self._change.notify_all()
                        return made, made.descriptors(wanted.shares)
                    failure = self.broken or self._failed.get(wanted.name)
                    if failure is not None and (failure.lasts or failure.at > asked - AGAIN):
                        return failure
                    if self._closed:
                        return None
                    if not self._wanted:
                        self._waits_since = time.monotonic()
                    self._wanted[me] = wanted
                    self._change.notify_all()
                    self._change.wait(WAIT)
                told = _say(waiting, told)
        finally:
            with self._change:
                if self._wanted.pop(me, None) is not None and not self._wanted:
                    self._waited += time.monotonic() - self._waits_since

    def expect(self, wanted: Wanted) -> None:
        """Note the step that a rank will want when it has used up those that it has in hand."""
        with self._change:
            if not len(self._ring):
                self._expected[wanted.number] = wanted

    def take(self, name: str) -> None:
        """Note that a rank takes the step after the state of this name, which it has already."""
        with self._change:
            self._ring.serve(name)
            self._change.notify_all()

    def made(
        self, name: str, shares: tuple[int, ...], most: int
    ) -> list[tuple[MadeStep, list[int]]]:
        """Return those of the next steps that are made already, as ``get`` does, for a rank to have
        in hand: they count as ahead until it takes them."""
        with self._change:
            return shared(self._ring.follow(name, shares, most), shares)

    def waited(self) -> float:
        """Return the seconds for which ranks have waited for steps, together."""
        with self._change:
            since = self._waits_since if self._wanted else time.monotonic()
            return self._waited + time.monotonic() - since

    def level(self) -> Level:
        """Return what is held now."""
        with self._change:
            return self._ring.level()

    def close(self) -> None:
        """Have ``run`` return."""
        with self._change:
            self._closed = True
            self._change.notify_all()

    # -- the main thread

    def run(self, load: Callable[[], NamedPlan]) -> None:
        """Make steps until closed, until the plan turns out to be broken (``load`` runs the user's
        code), or until a source hangs: the process must end then, for another one to go on."""
        try:
            plan = load()
            with self._change:
                self._plan = plan
                self._change.notify_all()
        except (Exception, SystemExit) as err:  # noqa: BLE001 - the ranks are to know
            with self._change:
                self.broken = _failure(err, lasts=True)
                self._change.notify_all()
            return
        source: Steps | None = None
        shares: frozenset[int] = frozenset()
        at = ""  # the name of the source's next step; "": it is nowhere
        while (task := self._task(shares, at)) is not None:
            wanted, for_shares, anew = task
            name = at if wanted is None else wanted.name
            try:
                if source is None or for_shares != shares or anew:
                    if source is not None:
                        source.close()
                    source, at, shares = None, "", frozenset()
                    source, shares = plan.steps(for_shares), for_shares
                if wanted is not None and name != at:
                    at = ""
                    source.seek(json.loads(wanted.state))
                at = self._make(source, name)
            except Exception as err:  # noqa: BLE001 - of the user's functions, too
                at = ""
                with self._change:
                    self._failed[name] = _failure(err)
                    self._closed |= isinstance(err, SourceStalled)
                    self._change.notify_all()
                if self._closed:
                    return
        if source is not None:
            source.close()

    def _task(
        self, shares: frozenset[int], at: str
    ) -> tuple[Wanted | None, frozenset[int], bool] | None:
        """Wait until there is something to do: a step that is wanted, or (None) the next one. Also
        returns the shares that it is for, and whether the source is of a world that is over."""
        with self._change:
            while not self._closed:
                now = time.monotonic()
                for name, failure in list(self._failed.items()):
                    if not failure.lasts and failure.at <= now - AGAIN:
                        del self._failed[name]
                if now < self._complete_at:
                    self._change.wait(self._complete_at - now)
                    continue
                for wanted in sorted(self._wanted.values(), key=lambda each: each.number):
                    known = wanted.name in self._failed
                    if not known and self._ring.find(wanted.name, wanted.shares) is None:
                        anew, self._other_world = self._other_world, False
                        fits = shares.issuperset(wanted.shares) and not anew
                        near = self._at + self._ring.level().most_ahead
                        if fits and at and self._at < wanted.number <= near:
                            return None, shares, False  # it is on the way there
                        return wanted, shares if fits else frozenset(self._shares), anew
                if self._expected and self._ranks:
                    anew, self._other_world = self._other_world, False
                    first = self._expected[min(self._expected)]
                    self._expected.clear()
                    return first, frozenset(self._shares), anew
                last = self._ring.last()
                if self._goes_on and self._ranks and last is not None:
                    anew, self._other_world = self._other_world, False
                    self._goes_on = False
                    return Wanted(last.after, last.state, ()), frozenset(self._shares), anew
                if at and not self._other_world and self._ring.wants_more():
                    return None, shares, False
                self._change.wait(WAIT)
            return None

    def _make(self, source: Steps, at: str) -> str:
        number, rows, state = source.next()
        held: dict[int, pages.SealedPage] = {}
        try:
            for share, batch in rows.items():
                held[share] = pages.write(batch)
        except BaseException:
            for page in held.values():
                page.close()
            raise
        text = as_text(state)
        made = MadeStep(at, number, held, text, digest(text))
        with self._change:
            if self._other_world:  # it was begun for a world that is over
                made.close()
                return ""
            self._at = number + 1
            self._expected.clear()
            self._ring.add(made)
            self._change.notify_all()
        return made.after


def _say(waiting: Callable[[], None], told: float) -> float:
    """Call ``waiting`` if it is time to; return when it was called last."""
    now = time.monotonic()
    if now - told < WAIT / 2:
        return told
    waiting()
    return now


def _failure(err: BaseException, lasts: bool = False) -> StepFailure:
    import traceback

    kind, now = type(err).__name__, time.monotonic()
    if isinstance(err, EndOfData):
        return StepFailure(kind, str(err), now, lasts=True)
    traceback.print_exc()
    if isinstance(err, DataError):
        return StepFailure(kind, str(err), now, lasts)
    last = traceback.extract_tb(err.__traceback__)[-1:]
    where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
    return StepFailure(kind, f"{kind}: {err}{where}", now, lasts)
