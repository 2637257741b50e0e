"""Requests to the in-memory stores of all nodes: list, fetch, write to disk, sum up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from robust_slurm.checkpoint.planning import plan as planner
from robust_slurm.checkpoint.store.events import WantedSnapshot
from srun_wrapper.checkpoints.enrolments import Enrolments, StoreAt
from srun_wrapper.command.rank_env import fold_hosts
from srun_wrapper.job.bus import Address, OpenRequest
from srun_wrapper.job.model import Node
from srun_wrapper.job.reporting.journal import Journal
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.checkpoint_messages import (
    Fetch,
    Flush,
    Moved,
    Stock,
    TakeStock,
)
from srun_wrapper.protocol.messages import Message

STOCK = 20.0  # s for a store to answer; if it checks a step, 8 more for each
STOCK_RATE = 1e9  # bytes of the largest snapshot
LEAVING = 1.0  # s longer for nodes that are leaving the job
FETCH = 600.0
FAILED = "the store failed and did not report why"
UNSEEN = 180.0  # s for a commit from when all parts are written

Copy = tuple[str, int, int]
"""Store, owner and step."""
WaitLimit = tuple[Callable[[], bool], float]
"""A condition, and the seconds that a wait may take from when it is met."""


class Stores:
    """All stores that can be reached. ``answers``: True if a node does not seem lost."""

    def __init__(
        self,
        state: JobState,
        enrolments: Enrolments,
        journal: Journal,
        answers: Callable[[Node], bool],
    ) -> None:
        self._state = state
        self._enrolments = enrolments
        self._journal = journal
        self._answers = answers

    def reachable(self, nodes: Iterable[Node] | None = None) -> dict[str, StoreAt]:
        """Return the stores that can be reached, by name; of these nodes only."""
        return {
            StoreAt(node, local).name: StoreAt(node, local)
            for node in (self._state.nodes.values() if nodes is None else nodes)
            for local, port in node.stores.items()
            if port
        }

    async def stock(
        self, over: Callable[[], bool], step: int | None = None
    ) -> list[planner.Holder]:
        """Collect the holdings of all reachable stores; of leaving nodes only if these are quick.

        ``step``: of this step only, checked byte by byte; else nothing is read.
        """
        nodes = [
            n
            for n in self._state.nodes.values()
            if n.connection is not None and n.stores and self._answers(n)
        ]
        stores = self.reachable(nodes).values()
        staying = {at.address for at in stores if not at.node.gone}
        # A node that does not answer to probes either is not waited for.
        everyone = {at.address for at in stores if not at.node.unreachable} | staying
        limit = STOCK + (0.0 if step is None else 8 * self._enrolments.largest / STOCK_RATE)
        with self._state.bus.ask(
            Stock, lambda token: [(node, TakeStock(token, step)) for node in nodes]
        ) as asked:
            await asked.until(lambda: over() or asked.answered(staying), limit)
            await asked.until(lambda: over() or asked.answered(everyone), LEAVING)
        return [_place(StoreAt(node, stock.local), stock) for node, stock in asked.replies]

    async def fetch(
        self, transfers: Sequence[planner.Transfer], over: Callable[[], bool]
    ) -> set[Copy]:
        """Have the stores fetch copies; return the source copies that could not be used."""
        if not transfers:
            return set()
        targets = {transfer.target for transfer in transfers}
        # A robust-task that died and was started again reports its store anew.
        await self._state.until(lambda: over() or targets <= self.reachable().keys(), STOCK)
        stores = self.reachable()
        if targets - stores.keys():
            return {(t.source, t.owner, t.step) for t in transfers if t.target not in stores}
        orders: dict[str, list[planner.Transfer]] = {}
        for transfer in transfers:
            orders.setdefault(transfer.target, []).append(transfer)

        def sent(token: int) -> Iterator[tuple[Node, Message]]:
            for target, group in orders.items():
                at = stores[target]
                items = tuple(WantedSnapshot(t.owner, t.step, t.host, t.port) for t in group)
                yield at.node, Fetch(token, at.local, items)

        wanted = {stores[target].address for target in orders}
        answers = await self._moved(sent, wanted, FETCH, over)
        bad: set[Copy] = set()
        for at, moved in answers:
            # A store that failed reports no outcome: that is no success.
            why = {(each.owner, each.step): each.why for each in moved.results if not each.ok}
            got = {(each.owner, each.step) for each in moved.results if each.ok}
            for each in orders.get(at.name, ()):
                if (each.owner, each.step) not in got:
                    reason = why.get((each.owner, each.step), FAILED)
                    self._journal.news(
                        f"{at.node.name}: rank {each.owner}'s step {each.step}: {reason}"
                    )
                    bad.add((each.source, each.owner, each.step))
        late = orders.keys() - {at.name for at, _ in answers}
        if over():
            return bad
        return bad | self._too_late([stores[target] for target in late], transfers)

    def _too_late(
        self, targets: Sequence[StoreAt], transfers: Sequence[planner.Transfer]
    ) -> set[Copy]:
        """Act on stores that did not fetch in time; return the copies not to be used again."""
        nodes = {at.node.key: at.node for at in targets}
        if len(nodes) == 1:  # it is the target that fails, not its sources
            # Nor is it known to be bad: its store may only be slow, or its way to a source.
            why = f"its store fetched no snapshots in {FETCH:g} s"
            (node,) = nodes.values()
            self._state.lose(node, why, shared=True)
        elif nodes:  # what they share is slow: a source, or the network
            names = fold_hosts(sorted(node.name for node in nodes.values()))
            what = f"no snapshots arrived at {names} in {FETCH:g} s"
            self._journal.news(f"{what}: other copies or durable checkpoints are used")
            late = {at.name for at in targets}
            return {(t.source, t.owner, t.step) for t in transfers if t.target in late}
        return set()

    async def flush(
        self,
        step: int,
        files: Mapping[str, Sequence[tuple[int, str]]],
        committer: tuple[str | None, int],
        seconds: float,
        over: Callable[[], bool],
        limits: Sequence[WaitLimit] = (),
    ) -> str:
        """Have stores write files of a step to the durable tier; return why not, or ''. A store
        that cannot write ends the wait: the step will not be whole. So does a committer that has
        not committed the step UNSEEN s after all have written: it does not see their parts.

        ``files``: (owner, file) by store; ``committer``: the store that commits the step, and
        the number of ranks that it waits for. ``limits``: of the wait, beside ``seconds``.
        """
        stores = self.reachable()
        name = stores[committer[0]].node.name if committer[0] in stores else ""
        own = [(owner, name) for owner, _ in files.get(committer[0] or "", ())]
        others = {stores[store].address for store in files if store != committer[0]}

        def orders(token: int) -> Iterator[tuple[Node, Message]]:
            for store, owners in files.items():
                at = stores[store]
                world = committer[1] if store == committer[0] else 0
                yield at.node, Flush(token, at.local, step, tuple(owners), world, seconds)

        wanted = {stores[store].address for store in files}
        written = self._enrolments.written
        since: list[float] = []  # when all had written
        with self._state.bus.ask(Moved, orders) as asked:

            def all_wrote() -> bool:
                wrote = asked.answered(others) and all(written.get(one) == step for one in own)
                if wrote and not since:
                    since.append(time.monotonic())
                return wrote

            limits = [(all_wrote, UNSEEN), *limits]
            await self._until_one_fails(asked, wanted, seconds + 1.0, over, limits)
            answers = [(StoreAt(node, moved.local), moved) for node, moved in asked.replies]
            late = bool(since) and time.monotonic() - since[0] >= UNSEEN
            unseen = late and committer[1] > 0 and not asked.answered(wanted)
        bad = [done.why for _, moved in answers for done in moved.results if not done.ok]
        if bad:
            return bad[0]
        if unseen and not over():
            return (
                f"all ranks have written their parts, but {name} did not commit the step in time: "
                f"does it see all of them in {self._enrolments.directory}?"
            )
        if len(answers) < len(files):
            return "no answer in time"
        wrote = {(at.name, done.owner) for at, moved in answers for done in moved.results}
        ordered = {(store, owner) for store, owners in files.items() for owner, _ in owners}
        return FAILED if ordered - wrote else ""

    async def _moved(
        self,
        orders: Callable[[int], Iterable[tuple[Node, Message]]],
        wanted: Set[Address],
        limit: float,
        over: Callable[[], bool],
    ) -> list[tuple[StoreAt, Moved]]:
        with self._state.bus.ask(Moved, orders) as asked:
            await asked.until(lambda: over() or asked.answered(wanted), limit)
        return [(StoreAt(node, moved.local), moved) for node, moved in asked.replies]

    async def _until_one_fails(
        self,
        asked: OpenRequest[Moved],
        wanted: Set[Address],
        limit: float,
        over: Callable[[], bool],
        limits: Iterable[WaitLimit],
    ) -> None:
        """Wait for all answers, or for one that is a failure."""
        seen, failed, unmet = 0, False, list(limits)
        until = time.monotonic() + limit

        def ended() -> bool:
            nonlocal seen, failed
            new, seen = asked.replies[seen:], len(asked.replies)
            failures = (not m.results or any(not done.ok for done in m.results) for _, m in new)
            failed = failed or any(failures)
            return failed or over() or asked.answered(wanted)

        def due() -> bool:
            return ended() or any(met() for met, _ in unmet)

        while not ended():
            met = [each for each in unmet if each[0]()]
            unmet = [each for each in unmet if each not in met]
            until = min([until, *(time.monotonic() + more for _, more in met)])
            if not await asked.until(due, until - time.monotonic()):
                return


def _place(at: StoreAt, stock: Stock) -> planner.Holder:
    port = at.node.stores.get(at.local, 0)
    host = at.node.store_host or at.node.address
    return planner.Holder(at.name, at.node.name, host, port, stock.held)
