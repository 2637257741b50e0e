"""The watch for jobs that make no step: inspect the ranks, judge the answers, report a hang.

It looks once early, to locate what the ranks wait for, then more closely. Nothing is done then: a
slow loader or an upload looks like a hang for a while. Beyond the limit it looks again and again,
and judges (``job.pace``). A hang names a node only by evidence of the node's own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from robust_slurm.error_counters import weight
from srun_wrapper.decide import counters
from srun_wrapper.decide.failure import Failure
from srun_wrapper.detect.closer import CloserFindings, read_recorders
from srun_wrapper.detect.inspections import Replies, active, inspect
from srun_wrapper.detect.rank_views import rank_views
from srun_wrapper.detect.stalls import own_mounts
from srun_wrapper.job.model import Node, Rank
from srun_wrapper.job.pace import START_INSPECT, HangVerdict, WorkSigns, judge
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.locate.locate import Located, locate
from srun_wrapper.locate.ranks import RankView
from srun_wrapper.locate.story import story
from srun_wrapper.protocol.messages import SlotActivity

WINDOW = 1.0  # s over which ranks are inspected
PARTIAL = 3  # inspections in a row without an answer of some ranks, until the others decide
EARLY_WINDOW = 0.2  # s, when they are only to be located
CLOSER_EVERY = 30.0  # s between two closer looks, as they cost the ranks memory and time
EVERY = 5.0  # s between two inspections; a tenth of the time without a step where that is longer,
SELDOM = 30.0  # s, and this at most
RECORDERS_EVERY = 4  # likewise, of two readings of flight recorders: a fourth of that time
Tell = Callable[[Located, Sequence[str], float], None]
"""Gets what was located, the lines that say who waits for whom, and the s without a step."""
TellCloser = Callable[[Sequence[str], Sequence[str]], None]
"""Gets the lines of a closer look, and those of them that are worth printing at once."""
_log = logging.getLogger("robust-srun.hang")


class StallPlace(NamedTuple):
    """The point that a job had come to when it stopped to step."""

    step: int | None  # the newest of this incarnation; None: steps are not numbered
    beats: int  # steps of this incarnation
    saved: int | None  # newest saved step

    def same(self, other: StallPlace) -> bool:
        """Return whether a stall here, after a restart, is the one of ``other`` again.

        Where steps are only counted, the saved steps decide; where none are saved, an incarnation
        that has made about as many steps as the other.
        """
        if not self.beats or not other.beats:
            return self.beats == other.beats
        if self.step is not None:
            return self.step == other.step
        if self.saved is not None:
            return self.saved == other.saved
        return abs(self.beats - other.beats) <= max(2, other.beats // 10)


class HangWatch:
    """Asks the ranks what they do when no step comes in time, and judges the answers."""

    def __init__(
        self,
        state: JobState,
        excused: Callable[[], bool] = lambda: False,
        mesh: Callable[[], Mapping[str, int]] = dict,
        tell: Tell = lambda _located, _lines, _silent: None,
        tell_closer: TellCloser = lambda _lines, _news: None,
        hindered: Callable[[], str] = lambda: "",
    ) -> None:
        """``excused``: whether the ranks wait for a file system that does not answer; ``mesh``: the
        job's parallel dimensions, as far as they are known; ``hindered``: the reason for
        which the ranks cannot be started again in this step, so that a hang would be the end of the
        job; "": they can."""
        self._hindered = hindered
        self._state = state
        self._config = state.config
        self._pace = state.pace
        self._world = state.world
        self._excused = excused
        self._mesh = mesh
        self._tell = tell
        self._tell_closer = tell_closer
        self._closer: tuple[tuple[float, float], CloserFindings] | None = None
        self._closer_task: asyncio.Task[None] | None = None
        self._closer_next = 0.0
        self._located: tuple[tuple[float, float], Located, Sequence[str]] | None = None
        self._early: asyncio.Task[None] | None = None
        self._looked_for = -1.0  # time of the last step when the early look was made
        self._busy: asyncio.Task[None] | None = None
        self._next = 0.0
        self._partial = 0
        self._signs = WorkSigns()
        self._recorders_next = 0.0
        self._stall = (-1.0, -1.0)  # the one that these are of:
        self._traced = ""  # the debugger that traces a rank, as it was printed
        self._hung_at: StallPlace | None = None  # the place of the last hang
        self._times = 0  # hangs in a row at that place
        self._was_stopped = False  # a rank was stopped in the last of them
        self._told_again: tuple[float, float] | None = None
        self._told_left: tuple[float, float] | None = None  # the hang that was left alone

    def look(self, now: float) -> None:
        """Start an inspection when one is due."""
        pace = self._pace
        if self._excused():
            pace.excuse(now)
        if not self._config.hang or now < self._next:
            return
        if pace.silent(now) < pace.limit():
            self._partial = 0
            self._look_early(now)
        if pace.silent(now) < pace.inspect_after():
            return
        for task in (self._early, self._closer_task):
            if task is not None:
                task.cancel()  # a node that does not answer must not hold up this inspection
        if self._busy is None or self._busy.done():
            self._busy = asyncio.create_task(self._inspect())

    def _beating(self) -> bool:
        return self._state.progress.best is not None or self._pace.slowest > 0

    def _look_early(self, now: float) -> None:
        pace = self._pace
        if self._looked_for != pace.last:
            self._located = None
        after = pace.locate_after()
        if after is None or pace.silent(now) < after or self._looked_for == pace.last:
            return
        tasks = (self._busy, self._early)
        if all(task is None or task.done() for task in tasks):
            self._looked_for = pace.last
            if self._beating() and not self._world.is_ending():
                self._early = asyncio.create_task(self._locate_early())

    async def _locate_early(self) -> None:
        state, last, epoch = self._state, self._pace.last, self._world.epoch
        # The job may be well: its ranks are only read, and get no signal.
        nodes = active(state)
        replies = await inspect(state, nodes, EARLY_WINDOW, signals=False)
        now = time.monotonic()
        if state.world.epoch != epoch or state.failures or self._excused():
            return
        if state.pace.last == last and not state.pace.phase and not state.world.is_ending():
            located, lines, views = self._try_to_locate(replies)
            if located.clear:
                self._located = self._since(), located, lines
                self._tell(located, lines, state.pace.silent(now))
            self._start_closer(views, now)

    def _start_closer(self, views: Sequence[RankView], now: float) -> None:
        """Look at flight recorders, unless that was done a short time ago."""
        if views and now >= self._closer_next:
            self._closer_next = now + CLOSER_EVERY
            self._closer_task = asyncio.create_task(self._look_closer(views))

    async def _look_closer(self, views: Sequence[RankView]) -> None:
        state, since, epoch = self._state, self._since(), self._state.world.epoch
        try:
            found = await read_recorders(state, active(state), views)
            if not (self._old(epoch) or state.world.is_ending() or self._since() != since):
                self._closer = since, found
                self._tell_closer(found.lines(), found.news())
        except Exception:  # noqa: BLE001 - it is evidence and no more
            _log.exception("internal error: no closer look at the ranks")

    def _since(self) -> tuple[float, float]:
        """Return the identity of this stall: times of the last step and the last phase change."""
        return self._pace.last, self._pace.phase_since

    def _try_to_locate(self, replies: Replies) -> tuple[Located, Sequence[str], Sequence[RankView]]:
        """Return what was located, the lines that say who waits for whom, and what was seen."""
        try:
            nodes = [(node, replies[node.key].samples) for node in active(self._state, replies)]
            views = rank_views(self._world, nodes)
            located = locate(views, self._mesh())
            return located, story(views, located), views
        except Exception:  # noqa: BLE001 - else nobody would hear of the hang
            _log.exception("internal error: what the ranks wait for is not known")
            return Located(), (), ()

    async def _inspect(self) -> None:
        state = self._state
        epoch = state.world.epoch
        nodes = active(state)
        replies = await inspect(state, nodes, WINDOW)
        now = time.monotonic()
        silent = state.pace.silent(now)
        every = max(min(EVERY, max(1.0, state.pace.floor / 2)), min(SELDOM, silent / 10))
        if not self._beating() and not state.pace.phase:
            every = SELDOM  # its steps may not be seen: it is looked at as long as it runs
        self._next = now + every
        if self._old(epoch):
            return
        alone = [(node, mounts) for node in nodes if (mounts := own_mounts(node, nodes))]
        if len(alone) == 1:  # and the limit for waiting is over, see ``_excused``
            ((node, mounts),) = alone
            others = (reply for key, reply in replies.items() if key != node.key)
            well = {mount for reply in others for mount in reply.answering}
            node.own_mount = next((mount for mount in mounts if mount in well), "")
            where = "it answers on other nodes" if node.own_mount else "no other node uses it"
            mount = node.own_mount or mounts[0]
            what = f"file system {mount} has not answered for {now - node.stalled_at[mount]:.0f} s"
            why = f"{what}, and {where}"
            state.lose(node, why, shared=not node.own_mount)  # else its server may be away
            return
        ranks: dict[int, Rank] = {}
        samples: dict[int, SlotActivity] = {}
        for node in nodes:
            reply = replies.get(node.key)
            for sample in reply.samples if reply else ():
                rank = state.world.rank_at(node, sample.local)
                if rank is not None and rank.rank >= 0 and rank.exit is None:
                    ranks[rank.rank], samples[rank.rank] = rank, sample
        if not samples:
            return
        alive = sum(rank.exit is None for rank in self._world.by_rank.values())
        self._partial = self._partial + 1 if len(samples) < alive else 0
        if self._stall != self._since():
            self._stall, self._traced = self._since(), ""
            self._signs, self._recorders_next = WorkSigns(), 0.0
        if self._is_traced(samples, ranks, now):
            return
        pace, ending = state.pace, state.world.is_ending()
        self._signs.note(now, samples, WINDOW)
        pace.again = self._times if self._hung_at and self._place().same(self._hung_at) else 0
        pace.stopped_again = self._was_stopped
        verdict = self._judge(now, samples, ending)
        beyond = pace.silent(now) >= pace.limit()
        due = beyond and not ending and now >= self._recorders_next
        if due and not verdict.hung and len(samples) == alive:
            self._recorders_next = now + max(CLOSER_EVERY, pace.silent(now) / RECORDERS_EVERY)
            held = await self._held(replies)
            self._signs.forget_counters()  # the reading itself has used memory
            if self._old(epoch):
                return
            verdict = self._judge(now, samples, ending, held)
        within = pace.silent(now) < pace.busy_patience()
        if 0 < self._partial < PARTIAL and within and not verdict.ranks:
            return  # the ranks of which nothing is known may be at work
        if ending:
            self._next = now + START_INSPECT  # only stopped ranks are looked for
        if beyond and pace.again and self._beating():
            self._tell_again()
        stopped = all(samples[r].state == "T" for r in verdict.ranks) and verdict.ranks
        known = self._beating() or stopped or pace.phase
        none = state.config.max_restarts <= 0
        hindered = "max_restarts is 0" if none else self._hindered() if verdict.hung else ""
        if verdict.hung and known and not hindered:
            self._hung(verdict.why, verdict.ranks, ranks, replies, ending)
            return
        if known and (verdict.hung or (beyond and not ending)):
            self._waits(verdict, hindered, replies, now)
        if state.config.verbose:
            state.on_news(f"no step for {pace.silent(now):.1f} s: {verdict.why}")

    def _waits(self, verdict: HangVerdict, hindered: str, replies: Replies, now: float) -> None:
        """Note for robust-status what the ranks wait for; print a hang that is left alone."""
        state, silent = self._state, self._pace.silent(now)
        located, lines, _ = self._try_to_locate(replies)
        why = f"{verdict.why}; nothing is done: {hindered}" if verdict.hung else verdict.why
        state.waits = (self._pace.last, "; ".join((f"no step for {silent:.0f} s: {why}", *lines)))
        if verdict.hung and self._told_left != (since := self._since()):
            self._told_left = since
            self._tell(located, (why, *lines), silent)

    def _judge(
        self,
        now: float,
        samples: Mapping[int, SlotActivity],
        ending: bool,
        held: Mapping[int, float] = {},
    ) -> HangVerdict:
        unlike = self._mismatch()
        why = unlike.why if unlike else ""
        return judge(self._pace, now, samples, WINDOW, self._signs, ending, held, why)

    def _is_traced(
        self, samples: Mapping[int, SlotActivity], ranks: Mapping[int, Rank], now: float
    ) -> bool:
        """Return whether a debugger traces a rank: no limit counts then, and it is printed."""
        found = next(((r, s.tracer) for r, s in samples.items() if s.tracer), None)
        if found is None:
            if self._traced:
                self._traced = ""
                say("no rank is traced any more: the limits count from now")
                self._pace.excuse(now)
                return True
            return False
        rank, tracer = found
        if self._traced != tracer:
            self._traced = tracer
            node = ranks[rank].node.name
            say(f"{tracer} traces rank {rank} on {node}: no limit counts until it detaches")
        return True

    def _place(self) -> StallPlace:
        progress = self._state.progress
        steps = [r.step for r in self._world.by_rank.values() if r.step is not None and r.beats]
        step = max(steps, default=None) if progress.numbered else None
        return StallPlace(step, progress.beats, progress.saved)

    def _tell_again(self) -> None:
        """Print, once a stall, that the job waits where it waited before its last restart."""
        if self._told_again == (since := self._since()):
            return
        self._told_again = since
        step = self._place().step
        where = "at the same place as before" if step is None else f"at step {step + 1} as before"
        seconds = self._pace.patience()
        wait = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
        say(
            f"training waits {where} its last restart: waiting up to {wait} without a sign of work "
            "(hang_limit)"
        )

    def _mismatch(self) -> Located | None:
        """Return the ranks that are in another collective than the others, if any are."""
        if self._closer is None or self._closer[0] != self._since():
            return None
        return self._closer[1].mismatch()

    async def _held(self, replies: Replies) -> Mapping[int, float]:
        """Return how long ranks have been in one collective, as their flight recorders have it."""
        state, nodes, since = self._state, active(self._state, replies), self._since()
        if self._world.inner:  # recorders name torchrun's ranks, samples its slots: no match
            return {}
        try:
            views = rank_views(self._world, [(node, replies[node.key].samples) for node in nodes])
            found = await read_recorders(state, nodes, views)
        except Exception:  # noqa: BLE001 - then CPU alone decides
            _log.exception("internal error: no look at the flight recorders")
            return {}
        if self._since() != since:
            return {}
        if found.found:
            self._closer = since, found
        return found.held

    def _old(self, epoch: int) -> bool:
        """True if answers from that epoch no longer count."""
        return bool(self._state.world.epoch != epoch or self._state.failures or self._excused())

    def _hung(
        self,
        why: str,
        stopped: tuple[int, ...],
        ranks: Mapping[int, Rank],
        replies: Replies,
        ending: bool,
    ) -> None:
        """Report the hang, with what the ranks wait for: as seen now, else as seen early."""
        located: Located = Located()
        lines: Sequence[str] = ()
        closer = CloserFindings()
        unlike: Located | None = None
        # At the job's end each rank works by itself, so none stands out. A rank without data does
        # stand out, but its node is not to blame.
        if not ending and not (self._pace.waits_for_data and not stopped):
            located, lines, _ = self._try_to_locate(replies)
            early = self._located
            if not located.clear and early is not None and early[0] == self._since():
                _, located, lines = early
            if self._closer is not None and self._closer[0] == self._since():
                closer = self._closer[1]
            if (unlike := self._mismatch()) is not None:
                located, lines = unlike, lines[1:]  # the first one may name a suspect
        first_lines = 2 if located.clear else 0  # the ranks that stand out, and the first of them
        nodes = located.nodes
        if not nodes:
            nodes = tuple(dict.fromkeys(ranks[r].node.name for r in stopped if r in ranks))
        first = next(iter(located.ranks if located.nodes else stopped), None)
        state = self._state
        place = self._place()
        self._times = self._times + 1 if self._hung_at and place.same(self._hung_at) else 1
        self._hung_at, self._was_stopped = place, bool(stopped)
        named = [node for node in active(state, replies) if node.name in nodes]
        own = {node.name: own_evidence(node, replies[node.key].samples) for node in named}
        own = {name: found for name, found in own.items() if found}
        grounds = [line for found in own.values() for line in found]
        state.failures.append(
            Failure(
                "hang",
                time.monotonic(),
                state.pace.last,
                nodes[0] if nodes else "",
                first,
                evidence=(
                    why,
                    *lines[:first_lines],
                    *grounds,
                    *closer.lines(),
                    *lines[first_lines:],
                ),
                suspects=tuple(own),
                mismatch=unlike is not None and not nodes,  # a stopped rank explains more
            )
        )
        state.changed.set()


def own_evidence(node: Node, samples: Sequence[SlotActivity]) -> tuple[str, ...]:
    """Return what speaks against a node itself: a driver in which a rank hangs, grave counters."""
    devices = dict.fromkeys(look.device for s in samples for look in s.looks if look.device)
    grave = {name: count for name, count in node.counted.items() if weight(name) == 0}
    grown = counters.news(counters.NodeGrowth(node.name, grave, node.counted_shown))
    lines = [f"a rank waits for {device} in state D" for device in devices] + grown
    return tuple(f"{node.name}: {line}" for line in lines)
