"""Nodes of the standby partition for the vacant places: awaited, kept or sent away.

A standby node that does not run robust-task is excluded, and the next one requested (decision 24).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping

from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.recover.standby.asking import ASK, StandbyRequests, Wanted

LOOK = 1.0  # s between looks at what became of the requests
MOST_UNFIT = 3  # requests in a row that brought no node: the next one would not either


class StandbyNodes:
    """Awaits the standby nodes that were requested, and asks for others in place of unfit ones."""

    def __init__(
        self,
        state: JobState,
        requests: StandbyRequests,
        over: Callable[[], bool] = lambda: False,
        known: Callable[[Node], bool] = lambda _node: True,
    ) -> None:
        """``over``: True if another failure came, or the step is being ended; ``known``: whether
        it is known what a node lacks."""
        self._known = known
        self._state = state
        self._config = state.config
        self._requests = requests
        self._unfit = requests.unfit
        self._over = over

    async def take(
        self,
        places: Mapping[int, Wanted],
        vacant: Callable[[int], bool] = lambda _place: True,
        enough: Callable[[], bool] = lambda: False,
        fewer: bool = False,
    ) -> dict[int, Node]:
        """Return nodes for places, as many as join in time, while the places are ``vacant``.

        ``enough``: True if another way was found. ``fewer``: the job can go on without these nodes.
        Then it waits for Slurm to grant one for ``shrink_wait`` only; a later one is added.
        """
        state, began, asked = self._state, time.monotonic(), math.inf
        chosen: dict[int, int] = {}  # number of a request → its place
        lacking, tries, why = set(places), 0, ""
        reasons: asyncio.Task[str] | None = None

        def came() -> dict[int, Node]:
            nodes = [n for n in state.nodes.values() if n.role is Role.SPARE and n.connection]
            mine = [n for n in nodes if n.standby_request in chosen and self._known(n)]
            found = {chosen[n.standby_request]: n for n in mine if not n.lacks}
            return {place: node for place, node in found.items() if vacant(place)}

        def over() -> bool:
            return self._over() or enough()

        def complete() -> bool:
            return len(came()) == sum(map(vacant, places))

        def settled() -> bool:
            return complete() or over()

        def news() -> bool:
            requests = [self._requests.get(number) for number in chosen]
            changed = any(r is None or r.outcome != "waiting" for r in requests)
            return changed or settled()

        if (asking := self._requests.asking) is not None:
            asking.add_done_callback(lambda _done: state.changed.set())
            await state.until(lambda: asking.done() or settled(), None)
        while not settled():
            if lacking:
                why = await self._requests.ask_for([places[p] for p in lacking], [], settled)
                if why:
                    break
                chosen |= self._requests.assign({place: places[place][0] for place in lacking})
                asked = time.monotonic()
            waits = self._config.standby_wait
            if fewer and not self._given(chosen, came()):
                waits = min(waits, self._config.shrink_wait)
            left = asked + waits - time.monotonic()
            if left <= ASK and reasons is None:
                reasons = asyncio.create_task(
                    self._requests.held_up(settled)
                )  # it is asked while the nodes are awaited, and costs no more time
            if left <= 0:
                assert reasons is not None
                if not (why := await reasons):  # Slurm was away: it could give none
                    asked, reasons = time.monotonic(), None
                    continue
                if waits < self._config.standby_wait:
                    await self._requests.learn_allotted(chosen)
                    if self._given(chosen, came()):
                        reasons = None
                        continue
                break
            self._requests.read_allotted(chosen, LOOK)
            await state.until(news, min(LOOK, left))
            if self._refused(chosen):
                why = "srun's message above has the reason"
                break
            lacking = self._review(chosen, came())
            # A lease that fitted when Slurm was asked may have been lost before it was assigned.
            lacking |= places.keys() - set(chosen.values())
            lacking = set(filter(vacant, lacking))
            tries += bool(lacking)
            if tries > MOST_UNFIT:
                break
        if reasons is not None:
            reasons.cancel()
        ready = came()
        short = not settled()
        self._dismiss(chosen, ready)
        if short:
            self._complain(len(ready), len(places), why, time.monotonic() - began)
        return ready

    def _given(self, chosen: Mapping[int, int], ready: Mapping[int, Node]) -> bool:
        """True if Slurm has given a node that has not come yet."""
        requests = [self._requests.get(n) for n, place in chosen.items() if place not in ready]
        return any(r is not None and r.outcome == "waiting" and r.node for r in requests)

    def _refused(self, chosen: Mapping[int, int]) -> bool:
        """True if Slurm grants no node, or srun could not be run: the request is then dropped."""
        joined = {n.standby_request for n in self._state.nodes.values()}
        requests = [self._requests.get(number) for number in chosen if number not in joined]
        return any(r is None or r.outcome == "refused" for r in requests)

    def _review(self, chosen: dict[int, int], ready: Mapping[int, Node]) -> set[int]:
        """Return the places that need another request: their node did not join, or is silent."""
        now, lacking = time.monotonic(), set[int]()
        limit = self._config.standby_start_limit
        joined = {n.standby_request: n for n in self._state.nodes.values() if n.standby_request}
        for number, place in list(chosen.items()):
            request, node = self._requests.get(number), joined.get(number)
            if place in ready:
                continue
            if node is not None and node.gone:
                if node.role is not Role.RELEASED:  # which Slurm has taken back
                    self._unfit.note(node.name, node.job_id, "it was lost before it had ranks")
            elif request is None or request.outcome == "refused":
                continue
            elif request.outcome == "unfit":
                self._unfit.note_ended(request)
            elif request.outcome == "waiting" and node is None and request.silent(now, limit):
                alone = sum(place == other for other in chosen.values()) == 1
                if alone:  # the request stays, beside a second one: the first node to join is used
                    lacking.add(place)
                    self._unfit.note_silent(request, now)
                continue
            elif request.outcome != "again":
                continue
            del chosen[number]
            self._requests.drop(number)
            lacking.add(place)
        return lacking - set(ready)

    def _dismiss(self, chosen: Mapping[int, int], ready: Mapping[int, Node]) -> None:
        """Withdraw the requests that brought no node, unless a new failure may need them."""
        state, now, limit = self._state, time.monotonic(), self._config.standby_start_limit
        for number, place in chosen.items():
            node, request = ready.get(place), self._requests.get(number)
            if node is not None and node.standby_request == number:
                self._unfit.forget(node.name)  # it was only slow
                continue
            if node is not None and request is not None and request.silent(now, limit):
                other = self._requests.get(node.standby_request)
                if other is not None and now - other.since < limit:  # no cause delayed both nodes
                    self._unfit.report(request.node)
            if node is None and request is not None and state.failures and not state.signalled:
                request.used = False  # it keeps its turn in Slurm's queue
            else:
                self._requests.drop(number)  # it may still come: then it is sent away

    def _complain(self, came: int, wanted: int, why: str, seconds: float) -> None:
        if self._requests.told(why):
            return
        reasons = (
            "; ".join(filter(None, [*self._unfit.lines(), why])) or "no request reached a node"
        )
        say(
            f"partition {self._config.standby_partition} gave {came} of {wanted} nodes "
            f"in {seconds:.1f} s ({reasons})"
        )

    def to_report(self, came: bool) -> dict[str, tuple[int, str]]:
        """Standby nodes to report: allocation, and what was seen; once each."""
        return self._unfit.to_report(came)
