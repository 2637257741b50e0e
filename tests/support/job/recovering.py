"""The real Recovery of a job of one node, in a test's own process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from made_job import KeptJournal, SentBus, made_stalls

from robust_slurm.config import Config
from srun_wrapper.checkpoints.flushing import Flushing
from srun_wrapper.checkpoints.registry import Checkpoints
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.checkpoints.stores import Stores
from srun_wrapper.code.deployment import Deployment
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import Means
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.machine_tests import StopTests
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.protocol.messages import Hello, Message, Stop
from srun_wrapper.protocol.server import Connection
from srun_wrapper.recover.code_updates import CodeUpdates
from srun_wrapper.recover.localization import FaultLocalization
from srun_wrapper.recover.recovery import Recovery, Restoration
from srun_wrapper.recover.restarted import Restarted
from srun_wrapper.recover.settling import Settling


async def no_leaves() -> dict[str, str]:
    return {}


class Recovering:
    """The real Recovery of one node with two ranks that obey at once; no node can replace it."""

    def __init__(
        self,
        max_restarts: int,
        *,
        rank_env: bool = True,
        tests: StopTests | None = None,
        deployment: Deployment | None = None,
    ) -> None:
        self.config = Config(
            max_restarts=max_restarts, stop_tests=150 if tests else 0, rank_env=rank_env
        )
        self.state = state = JobState(self.config, 12, "n0")
        hello = Hello(12, "0", 0, "n0", (0, 1), 1, 2, 7000, 7001, 0, 0)
        line = cast(Connection, SimpleNamespace(send=lambda _message: None))
        node = Node((12, "0", 0), "n0", "10.0.0.1", hello, line, Role.ACTIVE, 0.0, 7001)
        state.members.join(node)
        state.members.lay_out([node], [(0, 1)])
        self.phase = Phase()
        self.books: list[dict[str, Any]] = []
        self.bus = SentBus(state, self.obey)
        stopping = Stopping(state, made_stalls(state))
        journal = KeptJournal()
        checkpoints = Checkpoints(state, journal, no_leaves)
        certificates, known = checkpoints.certificates, checkpoints.enrolments
        stores = Stores(state, known, journal, lambda _node: True)
        restoring = Restoring(state, known, certificates, stores, journal)
        flushing = Flushing(state, known, certificates, stores, never)
        none = no_nodes(max_restarts)
        ledger = cast(Any, SimpleNamespace(code=self.books.append))
        self.code = CodeUpdates(state, deployment, ledger, journal)
        self.incidents: list[Incident] = []
        self.recovery = Recovery(
            state,
            Settling(state, NodeWatch(state), lambda: None, never),
            FaultLocalization(
                state,
                cast(StopTests, tests),
                cast(Any, None),
                stopping.end_world,
                none.release.evict,
            ),
            none,
            stopping,
            Restoration(restoring, flushing, certificates),
            Restarted(state, self.phase, lambda: None, lambda: 0, never, self.code.is_due),
            kill_on_bad=stays,
            code=self.code,
            phase=self.phase,
            journal=journal,
            record=self.incidents.append,
            start_epoch=self.begin_epoch,
        )
        self.begin_epoch("")

    def begin_epoch(self, _reason: str) -> None:
        self.state.new_epoch()
        for rank in self.state.world.by_rank.values():
            self.state.world.note_started(rank)

    def obey(self, node: Node, message: Message) -> None:
        if isinstance(message, Stop):
            node.stopped = message.epoch


def never() -> bool:
    return False


async def stays() -> bool:
    return False


def no_nodes(max_restarts: int) -> Any:
    """Stand for NodeParts with nothing to offer: every recovery is a restart in place."""

    async def fill(_incident: Any) -> bool:
        return True

    def nothing(*_any: Any) -> None: ...

    means = SimpleNamespace(
        now=lambda standby_nodes=0: Means(0, 0, False, max_restarts),
        rejoin=lambda *_any: 0.0,
        joined=nothing,
    )
    release = SimpleNamespace(evict=nothing, release=nothing)
    replacement = SimpleNamespace(
        fill=fill, just_joined=lambda: set[str](), joined=nothing, exchange=lambda _node: ""
    )
    reports = SimpleNamespace(report_silent=nothing)
    ahead = SimpleNamespace(for_vacant=nothing)
    return SimpleNamespace(
        means=means,
        release=release,
        replacement=replacement,
        reports=reports,
        prerequest=ahead,
        needed=None,
        last_rung=None,
    )
