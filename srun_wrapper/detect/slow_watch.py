"""The watch for jobs whose steps become slower: look at the ranks in rounds, name the slow ones.

Ranks are not looked at while steps are as fast as before. In start-up, in a phase, while ranks end
or while a file system stalls it cannot be said what is slow: then the looks are given up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from srun_wrapper.detect.inspections import active, inspect
from srun_wrapper.detect.rank_views import rank_views
from srun_wrapper.detect.slow_facts import Facts, Seen, corroborated, facts_of, of_any
from srun_wrapper.job.state import JobState
from srun_wrapper.job.tempo import Slowdown
from srun_wrapper.locate.ranks import RankView
from srun_wrapper.locate.slow import LOOKS, ROUNDS, Slow, judge
from srun_wrapper.locate.stacks import Stack
from srun_wrapper.protocol.looking_messages import Machine
from srun_wrapper.run_in_thread import run_in_thread

PAUSE = 10.0  # s between two rounds, at most
ROUND_SHARE = 6  # of slow_after: s between two rounds
LOOK_SHARE = 60  # likewise, between two looks of a round
STEP_SHARE = 0.37  # of a step between two looks, so that they see different parts of it
AGAIN = 10  # times slow_after until the next rounds; twice as long after each without a name
DOUBLED = 7  # times, at most
JUDGE = 60.0  # s
NEAR_HANG = 0.9  # of the time without a step until the ranks are located: that look goes first
_log = logging.getLogger("robust-srun.slow")


@dataclass(frozen=True, slots=True)
class SlowFinding:
    """The job's step time, the ranks that make it slow, and what is special about their node."""

    pace: Slowdown
    slow: Slow
    facts: Facts

    @property
    def corroborated(self) -> bool:
        return corroborated(self.slow, self.facts)


class SlowWatch:
    """Compares the step time with its own past whenever a period of steps is over."""

    def __init__(
        self,
        state: JobState,
        excused: Callable[[], bool],
        found: Callable[[SlowFinding], None],
        eased: Callable[[Slowdown], None],
    ) -> None:
        """``excused``: whether the ranks wait for something known; ``eased``: called when a slow
        job is as fast as usual again."""
        self._state = state
        self._config = state.config
        self._pace = state.pace
        self._tempo = state.pace.tempo
        self._excused = excused
        self._found, self._eased = found, eased
        self._task: asyncio.Task[None] | None = None
        self._closed = 0  # periods that were looked at
        self._next = 0.0
        self._nameless = 0  # verdicts that named nobody
        self._usual: float | None = None  # before the job became slow

    def look(self, now: float) -> None:
        """Start to look at the ranks when the job has become slow."""
        tempo = self._tempo
        if self._config.slow == "ignore" or tempo.closed == self._closed:
            return
        self._closed = tempo.closed
        if self._task is not None and not self._task.done():
            return
        if self._usual is not None and tempo.eased(self._usual):
            self._eased(Slowdown(tempo.periods[-1], self._usual))
            tempo.accept(self._usual)
            self._usual = None
        slow = tempo.slow()
        if slow is not None and now >= self._next and self._may():
            self._next = now + self._config.slow_after
            self._task = asyncio.create_task(self._rounds(slow))

    def _may(self) -> bool:
        """True while the ranks can be expected to make steps."""
        state = self._state
        ranks = max(state.world.size, len(state.world.inner))
        off = state.failures or state.stopped() or state.world.is_ending() or self._excused()
        alone = ranks < 2 or not state.config.rank_env  # they do not wait for each other
        off = off or alone or state.world.uneven  # a rank with more shares than others is slower
        return not (off or state.pace.phase or state.pace.unknown)

    async def _rounds(self, slow: Slowdown) -> None:
        try:
            finding = await self._look_in_rounds(slow)
            if finding is not None:
                wait = AGAIN * self._config.slow_after * 2 ** min(DOUBLED, self._nameless)
                self._next = time.monotonic() + wait
                self._nameless += finding.slow.kind != "ranks"
                self._usual = self._usual or slow.usual
                self._tempo.accept(slow.now)
                self._found(finding)
        except Exception:  # noqa: BLE001 - whatever it is, the job goes on
            _log.exception("internal error: which rank is slow is not known")

    async def _look_in_rounds(self, slow: Slowdown) -> SlowFinding | None:
        """Look in rounds; None if something else came between, or the job is fast again."""
        state = self._state
        epoch, world = state.world.epoch, state.world.size
        errors: dict[str, dict[str, int]] = {}
        before: dict[str, Machine] = {}
        after: dict[str, Machine] = {}
        rounds: list[list[list[RankView]]] = []
        stacks: dict[Stack, Stack] = {}  # many ranks are in the same calls
        for number, wait in enumerate(self._waits(slow.now)):
            await asyncio.sleep(wait)
            if number % LOOKS == 0:
                rounds.append([])
            if number == LOOKS:  # the counters were read by now; older growth explains nothing
                errors = {node.name: dict(node.counted) for node in active(state)}
            if not self._may() or state.world.epoch != epoch:
                _log.info("the looks at a slow job are given up: something else came between")
                return None
            if self._near_hang():
                rounds[-1].append([])
                continue
            read = number in (0, LOOKS * ROUNDS - 2)
            nodes = active(state)
            replies = await inspect(state, nodes, 0.0, signals=False, quick=True, machine=read)
            for node in nodes:
                if node.key in replies and (machine := replies[node.key].machine) is not None:
                    before.setdefault(node.name, machine)
                    after[node.name] = machine
            answered = [(n, replies[n.key].samples) for n in nodes if n.key in replies]
            views = rank_views(state.world, answered)
            rounds[-1].append(
                [replace(v, stack=stacks.setdefault(v.stack, v.stack)) for v in views]
            )
        # Compared with the usual time from before the looks: these have made steps slower, too.
        if not state.pace.tempo.still_slow(slow.usual):
            _log.info("the job is not slow any more: no rank is named")
            return None
        # A launcher's ranks are more than the slots.
        ranks = max(world, *(len(look) for looks in rounds for look in looks))
        # A second for ten thousand ranks: too long for the loop.
        found = await run_in_thread(lambda: judge(rounds, ranks), JUDGE)
        if not self._may() or state.world.epoch != epoch:
            return None
        seen = _seen(before, after, errors, {n.name: n.counted for n in active(state)})
        return SlowFinding(slow, found, facts_of(found.node, seen) if found.node else of_any(seen))

    def _waits(self, step: float) -> Iterator[float]:
        """Yield the seconds before each look; uneven, so as not to be in step with the training."""
        most = self._config.slow_after
        between = min(PAUSE, max(step, most / ROUND_SHARE))
        gap = min(PAUSE, max(STEP_SHARE * step, most / LOOK_SHARE))
        for number in range(LOOKS * ROUNDS):
            uneven = 0.5 + 0.618 * number % 1.0
            yield gap * uneven + (between if number and number % LOOKS == 0 else 0.0)

    def _near_hang(self) -> bool:
        after = self._pace.locate_after()
        return after is None or self._pace.silent(time.monotonic()) >= NEAR_HANG * after


def _seen(
    before: Mapping[str, Machine],
    after: Mapping[str, Machine],
    errors: Mapping[str, Mapping[str, int]],
    now: Mapping[str, Mapping[str, int]],
) -> dict[str, Seen]:
    """Join what each node has said of itself."""
    out = dict[str, Seen]()
    for name, first in before.items():
        grown = dict[str, int]()
        if (was := errors.get(name)) is not None:
            later = now.get(name, {}).items()
            grown = {k: n - was.get(k, 0) for k, n in later if n > was.get(k, 0)}
        out[name] = Seen(first, after[name], grown)
    return out
