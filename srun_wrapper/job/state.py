"""The supervisor's state of its job."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from robust_slurm.config import Config
from srun_wrapper.decide import counters
from srun_wrapper.decide.failure import Failure, Symptom
from srun_wrapper.job.bus import Bus
from srun_wrapper.job.changes import Changes
from srun_wrapper.job.data import JobData
from srun_wrapper.job.membership import Membership
from srun_wrapper.job.model import AgentKey, Node, Role, World
from srun_wrapper.job.nonfinite import NonfiniteLosses
from srun_wrapper.job.pace import Pace
from srun_wrapper.job.progress import Progress
from srun_wrapper.job.spikes import Spikes
from srun_wrapper.protocol.code import Code
from srun_wrapper.protocol.messages import Finish, Message, Stop, WorkerEnded
from srun_wrapper.signatures.catalogue import Catalogue, load

INTERVALS = ((64, 0.25), (256, 0.5))  # up to so many nodes: s between reports
SLOWEST = 1.0  # s, with more
WRITTEN = 256  # paths that are remembered
READING = 1.0  # s that the end of an incident waits for error counters; ranks wait for none
ENDING = (signal.SIGTERM, signal.SIGINT)


class JobState:
    """Members, progress and failures; ``changed`` is set where others may wait for a change."""

    def __init__(
        self, config: Config, job_id: int, own_node: str, catalogue: Catalogue | None = None
    ) -> None:
        """``catalogue``: the signatures of errors; None: the built-in ones."""
        self.config = config
        self.catalogue = catalogue or load()
        self.job_id = job_id
        self.own_node = own_node
        self.step_id = "?"
        self.restarts = 0  # Slurm's count: a requeued job keeps the reports of its earlier runs
        self.code: Code | None = None  # that ranks start with; None: as the user's files are
        self.members = members = Membership(lambda text: self.on_news(text))
        self.nodes: Mapping[AgentKey, Node] = members.nodes
        self.live, self.spares, self.vacant = members.live, members.spares, members.vacant
        self.named = members.named
        self.pace = Pace(
            config.hang_floor, config.busy_limit, config.start_limit, config.hang_limit
        )
        self.pace.tempo.window = config.slow_after
        self.progress = Progress()
        self.nonfinite = NonfiniteLosses()
        self.spikes = Spikes()
        self.data = JobData()
        self.failures: list[Failure] = []
        self.changed = Changes()
        self.bus = Bus(self.nodes, self.changed)
        self.phases: dict[int, tuple[str, float]] = {}
        self.waits = (0.0, "")  # time of the last step, and what the ranks have waited for since
        self.signalled = 0  # the signal that ends the step, once it is being ended
        self.awaited: set[int] = set()  # requests for standby nodes that may still be met
        # other signals that the ranks were sent on purpose, and when each was last
        self.passed_on: dict[int, float] = {}
        self.passed_at = -math.inf  # when the last of them was
        self.early: set[int] = set()  # those of them that came when there were no ranks to get them
        self.written: list[str] = []  # files that ranks save their state in, the newest last
        self.ending = False  # the shims are told to finish
        self.learnt = False  # a rank has reported its imports: others can start warm
        self.on_news: Callable[[str], None] = lambda _text: None
        self.on_spike: Callable[[str], None] = lambda _text: None
        self.on_counters: Callable[[str, list[str]], None] = lambda _node, _grown: None
        self.on_store: Callable[[Node, Message], None] = lambda _node, _message: None
        self.on_back: Callable[[Node], None] = lambda _node: None
        self.on_tests: Callable[[Node, WorkerEnded], None] = lambda _node, _message: None

    # -- waiting

    async def until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``ready()``; False when ``timeout`` seconds pass first."""
        return await self.changed.until(ready, timeout)

    # -- views

    @property
    def world(self) -> World:
        return self.members.world

    @property
    def stopping_epoch(self) -> int:
        """Newest epoch whose ranks were told to stop: their exits are no failures."""
        return self.members.stopping_epoch

    @property
    def interval(self) -> float:
        if self.config.interval > 0:
            return self.config.interval
        return next((s for most, s in INTERVALS if len(self.nodes) <= most), SLOWEST)

    def stopped(self) -> bool:
        """True if the ranks are down, or told to stop, until the next epoch begins."""
        return self.stopping_epoch >= self.world.epoch

    # -- signals

    def pass_on(self, signum: int) -> None:
        """Note that someone has sent the ranks a signal that does not end the step."""
        self.passed_on[signum] = self.passed_at = time.monotonic()
        if self.failures or self.stopping_epoch >= self.world.epoch:
            self.early.add(signum)  # no ranks yet, or they are to be stopped: the next ones get it
        self.changed.set()

    def wrote(self, paths: Iterable[str]) -> None:
        """Note the files that ranks were seen to write."""
        fresh = dict.fromkeys(paths)
        self.written = [*(old for old in self.written if old not in fresh), *fresh][-WRITTEN:]

    def note_ending(self, answers: Callable[[Node], bool]) -> None:
        """Note that the step is being ended, if every node of it that ``answers`` was signalled."""
        own = [n for n in self.live() if not n.standby_request] or self.live()
        told = [n.signalled for n in own if n.signalled or answers(n)]
        if told and all(told) and not self.signalled:
            self.signalled = told[0]
            self.changed.set()

    def incident_id(self, number: object) -> str:
        """Return the id of an incident, which no earlier run of a requeued job has used."""
        run = f"r{self.restarts}" if self.restarts else ""
        return f"{self.step_id}{run}-{number}"

    # -- losses

    def _fail_node(
        self, node: Node, symptom: Symptom, why: str, *, silent: bool = False, shared: bool = False
    ) -> None:
        """Note that a node is lost: an ACTIVE one is a failure, an idle one only leaves."""
        if node.gone:
            return
        was = node.role
        node.silent_as = was if silent else None
        # When the step is being ended, a shim that has gone has done what it was told.
        ended = (self.signalled or self.ending) and not silent
        self.members.move(node, Role.RELEASED if ended else Role.DEAD)
        at = time.monotonic()
        self.on_news(f"{node.name} is lost: {why}")
        if was is Role.ACTIVE:
            evidence = (f"{node.name}: {why}",)
            self.failures.append(
                Failure(symptom, at, node.last_word, node.name, evidence=evidence, shared=shared)
            )

    def lose(
        self, node: Node, why: str, symptom: Symptom = "node_lost", *, shared: bool = False
    ) -> None:
        self._fail_node(node, symptom, why, shared=shared)
        self.changed.set()

    def lose_silent(self, node: Node, why: str, *, shared: bool) -> None:
        """Give a node up for its silence; it is taken back if it answers before it is replaced."""
        self._fail_node(node, "node_lost", why, silent=True, shared=shared)
        self.changed.set()

    def reinstate(self, node: Node) -> None:
        """Reinstate a node that was lost by its silence, unless it was replaced or told to end."""
        was, node.silent_as = node.silent_as, None
        if was is None or self.ending or isinstance(node.order, Finish):
            return  # told to end: Slurm has it back, or gets it
        if was is Role.ACTIVE and not any(node is one for one in self.world.places):
            return
        self.members.move(node, was)
        self.on_news(f"{node.name} answers again and stays in the job")
        self.on_back(node)
        lost = [f for f in self.failures if f.node == node.name and f.symptom == "node_lost"]
        self.failures[:] = [f for f in self.failures if f not in lost]
        epoch = self.world.epoch
        if was is Role.ACTIVE and node.stopped < epoch <= self.stopping_epoch:
            node.order = Stop(epoch, self.config.stop_grace)  # as all others have been

    # -- error counters

    async def counters_read(self) -> None:
        """Wait a moment for the nodes that still read theirs, for the incident that is to end."""

        def read() -> bool:
            ends = bool(self.failures or self.signalled)
            return ends or not any(node.reading for node in self.live())

        await self.until(read, READING)

    def show_counters(self, suspects: Collection[str]) -> tuple[str, ...]:
        """Return, in words, all error counters that grew since this was last asked."""
        nodes = list(self.nodes.values())
        found = counters.lines(
            [counters.NodeGrowth(n.name, n.counted, n.counted_shown) for n in nodes], suspects
        )
        for node in nodes:
            node.counted_shown = node.counted
        return found

    # -- epochs

    def nonfinite_open(self) -> bool:
        """True if some ranks have yet to report whether their losses are finite."""
        since = self.nonfinite.since
        if not since or time.monotonic() - since > 2 * self.interval:
            return False
        if any(n.role is Role.ACTIVE and n.last_word < since for n in self.world.places):
            return True
        return self.nonfinite.outstanding(self.world.running())

    def new_epoch(self) -> int:
        """Open the next epoch over the present places; returns its number."""
        self.members.begin_epoch()
        self.progress.new_epoch()
        self.nonfinite.new_epoch()
        self.spikes.new_epoch()
        self.pace.new_epoch(time.monotonic())
        self.data.new_epoch(time.monotonic())
        self.phases.clear()
        self.failures.clear()
        return self.world.epoch
