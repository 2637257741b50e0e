"""The watch for jobs that make no step: inspect the ranks, judge the answers, report a hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from srun_wrapper.decide.failure import Failure
from srun_wrapper.detect.stalls import own_mounts
from srun_wrapper.job.bus import Bus
from srun_wrapper.job.model import Rank, Role
from srun_wrapper.job.pace import START_INSPECT, is_frozen, judge
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import Inspect, Inspected, Sample

WINDOW = 1.0  # s over which ranks are inspected
REPLY = 12.0


class HangWatch:
    """Asks the ranks what they do when no step comes in time, and judges the answers."""

    def __init__(
        self, state: JobState, bus: Bus, excused: Callable[[], bool] = lambda: False
    ) -> None:
        """``excused``: whether the ranks wait for a file system that does not answer."""
        self._state = state
        self._bus = bus
        self._excused = excused
        self._busy: asyncio.Task[None] | None = None
        self._next = 0.0
        self._frozen_rounds = 0
        self._frozen_since = 0.0

    def look(self, now: float) -> None:
        """Start an inspection when one is due."""
        pace = self._state.pace
        if self._excused():
            pace.excuse(now)
        if not self._state.config.hang or now < self._next:
            return
        if pace.silent(now) < pace.inspect_after():
            self._frozen_rounds = 0
            return
        if not self._beating() and not pace.phase:
            # A command that never gave a sign of steps cannot be told from a slow one; only its
            # stopped processes can.
            self._next = now + 30.0
        if self._busy is None or self._busy.done():
            self._busy = asyncio.create_task(self._inspect())

    def _beating(self) -> bool:
        return self._state.progress.best is not None or self._state.pace.slowest > 0

    async def _inspect(self) -> None:
        state = self._state
        epoch = state.world.epoch
        active = [n for n in state.world.places if n.role is Role.ACTIVE and n.connection]
        wanted = {(node.key, 0) for node in active}
        # Not repeated: two debuggers at one rank keep each other out, and it looks frozen then.
        with self._bus.ask(
            Inspected, lambda token: [(n, Inspect(token, WINDOW)) for n in active], repeat=False
        ) as asked:
            await asked.until(
                lambda: asked.answered(wanted) or state.world.epoch != epoch, WINDOW + REPLY
            )
        replies = {node.key: reply for node, reply in asked.replies}
        now = time.monotonic()
        self._next = now + min(5.0, max(1.0, state.pace.floor / 2))
        if state.world.epoch != epoch or state.failures or self._excused():
            return
        alone = [(node, mounts) for node in active if (mounts := own_mounts(node, active))]
        if len(alone) == 1:  # and it has been waited for
            ((node, mounts),) = alone
            others = (reply for key, reply in replies.items() if key != node.key)
            well = {mount for reply in others for mount in reply.answering}
            node.own_mount = next((mount for mount in mounts if mount in well), "")
            where = "it answers on other nodes" if node.own_mount else "no other node uses it"
            what = f"file system {node.own_mount or mounts[0]} has not answered"
            why = f"{what} for {now - node.stalled_at:.0f} s, and {where}"
            state.lose(node, why, shared=not node.own_mount)  # else its server may be away
            return
        ranks: dict[int, Rank] = {}
        samples: dict[int, Sample] = {}
        for node in active:
            reply = replies.get(node.key)
            for sample in reply.samples if reply else ():
                rank = state.world.rank_at(node, sample.local)
                if rank is not None and rank.rank >= 0 and rank.exit is None:
                    ranks[rank.rank], samples[rank.rank] = rank, sample
        if not samples:
            return
        self._count_frozen(samples, now)
        verdict = judge(
            state.pace,
            now,
            samples,
            WINDOW,
            {number: rank.step for number, rank in ranks.items()},
            self._frozen_rounds,
            now - self._frozen_since,
            ending := state.world.is_ending(),
        )
        if ending:
            self._next = now + START_INSPECT  # only stopped ranks are looked for
        stopped = all(samples[r].state == "T" for r in verdict.ranks) and verdict.ranks
        if verdict.hung and (self._beating() or stopped or state.pace.phase):
            self._hung(verdict.why, verdict.ranks, ranks, samples)
        elif state.config.verbose:
            state.on_news(f"no step for {state.pace.silent(now):.1f} s: {verdict.why}")

    def _count_frozen(self, samples: dict[int, Sample], now: float) -> None:
        if not is_frozen(samples):
            self._frozen_rounds = 0
        elif self._frozen_rounds == 0:
            self._frozen_rounds, self._frozen_since = 1, now
        else:
            self._frozen_rounds += 1

    def _hung(
        self,
        why: str,
        odd: tuple[int, ...],
        ranks: dict[int, Rank],
        samples: dict[int, Sample],
    ) -> None:
        state = self._state
        nodes = tuple(dict.fromkeys(ranks[r].node.name for r in odd if r in ranks))
        evidence = [why]
        for number in odd[:4]:
            stack = samples[number].stack
            where = f" in {stack[0]}" if stack else ""
            node = ranks[number].node.name
            evidence.append(f"rank {number} on {node} stands out{where}")
        first = odd[0] if odd else min(ranks)
        state.failures.append(
            Failure(
                "hang",
                time.monotonic(),
                state.pace.last,
                ranks[first].node.name if odd else "",
                first if odd else None,
                evidence=tuple(evidence),
                suspects=nodes,
            )
        )
        state.changed.set()
