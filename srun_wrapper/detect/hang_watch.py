"""The watch for jobs that make no step: inspect the ranks, judge the answers, report a hang.

It looks once early, to locate what the ranks wait for, then more closely. Nothing is done then: a
slow loader or an upload looks like a hang for a while. Beyond the limit it looks again and judges.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from srun_wrapper.decide.failure import Failure
from srun_wrapper.detect.closer import CloserFindings, look_deeper, read_recorders
from srun_wrapper.detect.inspections import Replies, active, inspect
from srun_wrapper.detect.rank_views import rank_views
from srun_wrapper.detect.stalls import own_mounts
from srun_wrapper.job.model import Rank
from srun_wrapper.job.pace import START_INSPECT, is_frozen, judge
from srun_wrapper.job.state import JobState
from srun_wrapper.locate.locate import Located, locate
from srun_wrapper.locate.ranks import RankView
from srun_wrapper.locate.story import story
from srun_wrapper.protocol.messages import SlotActivity

WINDOW = 1.0  # s over which ranks are inspected
PARTIAL = 3  # inspections in a row without an answer of some ranks, until the others decide
EARLY_WINDOW = 0.2  # s, when they are only to be located
CLOSER_EVERY = 30.0  # s between two closer looks: they stop processes for a moment
Tell = Callable[[Located, Sequence[str], float], None]
"""Gets what was located, the lines that say who waits for whom, and the s without a step."""
TellCloser = Callable[[Sequence[str], Sequence[str]], None]
"""Gets the lines of a closer look, and those of them that are worth printing at once."""
_log = logging.getLogger("robust-srun.hang")


class HangWatch:
    """Asks the ranks what they do when no step comes in time, and judges the answers."""

    def __init__(
        self,
        state: JobState,
        excused: Callable[[], bool] = lambda: False,
        mesh: Callable[[], Mapping[str, int]] = dict,
        tell: Tell = lambda _located, _lines, _silent: None,
        tell_closer: TellCloser = lambda _lines, _news: None,
    ) -> None:
        """``excused``: whether the ranks wait for a file system that does not answer; ``mesh``: the
        job's parallel dimensions, as far as they are known."""
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
        self._frozen_rounds = 0
        self._frozen_since = 0.0
        self._partial = 0

    def look(self, now: float) -> None:
        """Start an inspection when one is due."""
        pace = self._pace
        if self._excused():
            pace.excuse(now)
        if not self._config.hang or now < self._next:
            return
        if pace.silent(now) < pace.inspect_after():
            self._frozen_rounds = self._partial = 0
            self._look_early(now)
            return
        if not self._beating() and not pace.phase:
            # A command that never reported a step may only be slow; only stopped processes show
            # that it hangs.
            self._next = now + 30.0
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
            self._start_closer(located, views, now)

    def _start_closer(self, located: Located, views: Sequence[RankView], now: float) -> None:
        """Look at flight recorders and native stacks, unless that was done a short time ago."""
        if views and now >= self._closer_next:
            self._closer_next = now + CLOSER_EVERY
            self._closer_task = asyncio.create_task(self._look_closer(located, views))

    async def _look_closer(self, located: Located, views: Sequence[RankView]) -> None:
        state, nodes = self._state, active(self._state)
        since, epoch = self._since(), state.world.epoch

        def old() -> bool:
            gone = state.world.epoch != epoch or state.failures or state.world.is_ending()
            return bool(gone) or self._since() != since or self._excused()

        try:
            found = await read_recorders(state, nodes, views)
            if old():
                return
            self._closer = since, found
            self._tell_closer(found.lines(), found.news())
            if located.clear and (lines := await look_deeper(state, nodes, views, located)):
                if old():
                    return
                self._closer = since, replace(found, processes=lines)
                self._tell_closer(lines, lines)
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
        self._next = now + min(5.0, max(1.0, state.pace.floor / 2))
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
        self._count_frozen(samples, now)
        frozen = self._frozen_rounds, now - self._frozen_since
        ending = state.world.is_ending()
        verdict = judge(state.pace, now, samples, WINDOW, *frozen, ending)
        within = state.pace.silent(now) < state.pace.hard_limit()
        if 0 < self._partial < PARTIAL and within and not verdict.ranks:
            return  # the ranks of which nothing is known may be at work
        beyond = state.pace.silent(now) >= state.pace.limit()
        if not verdict.hung and not ending and beyond and len(samples) == alive:
            held = await self._held(replies)
            if self._old(epoch):
                return
            verdict = judge(state.pace, now, samples, WINDOW, *frozen, ending, held)
        if ending:
            self._next = now + START_INSPECT  # only stopped ranks are looked for
        stopped = all(samples[r].state == "T" for r in verdict.ranks) and verdict.ranks
        if verdict.hung and (self._beating() or stopped or state.pace.phase):
            self._hung(verdict.why, verdict.ranks, ranks, replies, ending)
        elif state.config.verbose:
            state.on_news(f"no step for {state.pace.silent(now):.1f} s: {verdict.why}")

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
        earlier = self._closer
        if found.found and earlier is not None and earlier[0] == since:
            found = replace(found, processes=earlier[1].processes)
        self._closer = (since, found) if found.found else earlier
        return found.held

    def _old(self, epoch: int) -> bool:
        """True if answers from that epoch no longer count."""
        return bool(self._state.world.epoch != epoch or self._state.failures or self._excused())

    def _count_frozen(self, samples: dict[int, SlotActivity], now: float) -> None:
        if not is_frozen(samples):
            self._frozen_rounds = 0
        elif self._frozen_rounds == 0:
            self._frozen_rounds, self._frozen_since = 1, now
        else:
            self._frozen_rounds += 1

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
            if (unlike := closer.mismatch()) is not None:
                located, lines = unlike, lines[1:]  # the first one may name a suspect
        first_lines = 2 if located.clear else 0  # the verdict and its first rank
        nodes = located.nodes
        if not nodes:
            nodes = tuple(dict.fromkeys(ranks[r].node.name for r in stopped if r in ranks))
        first = next(iter(located.ranks if located.nodes else stopped), None)
        state = self._state
        state.failures.append(
            Failure(
                "hang",
                time.monotonic(),
                state.pace.last,
                nodes[0] if nodes else "",
                first,
                evidence=(why, *lines[:first_lines], *closer.lines(), *lines[first_lines:]),
                suspects=nodes,
                mismatch=unlike is not None and not nodes,  # a stopped rank explains more
            )
        )
        state.changed.set()
