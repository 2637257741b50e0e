"""The means that the ladder may count on: spares, standby nodes, a requeue."""

from __future__ import annotations

import time
from collections.abc import Callable

from srun_wrapper.command import steps
from srun_wrapper.command.input_rules import ONLY_HERE, limited
from srun_wrapper.command.kinds import mpi_world
from srun_wrapper.decide.bounds import Copies
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import Means
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.rejoining import may_stay
from srun_wrapper.recover.reports import Reports
from srun_wrapper.recover.resize.resizing import Resizing
from srun_wrapper.recover.standby.nodes import MOST_UNFIT
from srun_wrapper.recover.standby.request import MAX_STANDBY_NODES

EARLY = 60.0  # s; a program that fails later was at work


class AvailableMeans:
    """Counts what is left, and remembers nodes that joined and could not run a rank."""

    def __init__(
        self,
        state: JobState,
        launch: steps.Launch,
        reports: Reports,
        copies: Callable[[], Copies],
        resizing: Resizing,
    ) -> None:
        """``copies``: see ``Means``."""
        self._resizing = resizing
        self._restarts = state.restarts
        self._members = state.members
        self._world = state.world
        self._progress = state.progress
        self._pace = state.pace
        self._reports = reports
        self._copies = copies
        self._config = launch.observed or state.config
        self._launch = launch
        self._unfit: set[str] = set()  # came since all ranks last stepped, and could not run one
        self._told_feed = False

    def unfit(self, names: tuple[str, ...]) -> None:
        """Note nodes that have joined and could not run a rank."""
        self._unfit.update(names)

    def joined(self) -> None:
        """Note that all nodes run ranks: the standby nodes that are left may be well."""
        self._unfit.clear()

    def _early(self) -> bool:
        """See ``Means.early``."""
        none = self._progress.best is None and not self._progress.beats
        first = self._world.epoch == 1 and none
        lived = time.monotonic() - self._pace.epoch_since
        return first and lived < EARLY and not self._config.early_restart

    def rejoin(self, incident: Incident, failures: int, other_code: bool) -> float:
        """Return the seconds for ranks to say that they stay for the next epoch; 0: all end.

        ``failures``: in a row without progress, this one included.
        """
        exchange = incident.plan is not None and bool(incident.plan.exchange)
        symptom = incident.diagnosis.symptom
        stay = may_stay(symptom, failures, other_code=other_code, exchange=exchange)
        return self._config.rejoin_limit if stay else 0.0

    def now(self, standby_nodes: int | None = None) -> Means:
        """Return the means that the ladder may count on now."""
        if standby_nodes is None:
            some = self._config.standby_partition and len(self._unfit) < MOST_UNFIT
            standby_nodes = MAX_STANDBY_NODES if some else 0
        batch = self._launch.env.get("SLURM_JOB_BATCH_HOST") or self._launch.env.get("ENVIRONMENT")
        requeue = self._config.requeue == "auto" and bool(batch)
        spares = len(self._members.spares())
        if self._launch.observed is not None:  # in observe mode all nodes run ranks
            spares = self._config.spares
        before = {bad.node: int(bad.strength) for bad in self._reports.evidence()}
        means = Means(
            spares,
            standby_nodes,
            requeue,
            self._config.max_restarts,
            early=self._early(),
            copies=self._copies(),
            before=before,
            world=mpi_world(self._launch.command),
            requeues=self._restarts,
            stepped=self._progress.stepped,
            again=self._world.epoch > 1,
            not_fewer=self._resizing.without,
            resize_failed=self._resizing.failed,
        )
        had = [whole for n in self._world.places for whole in n.stdin.values()]
        left = limited(means, self._launch.feed, had)
        if left.standby_nodes < means.standby_nodes and not self._told_feed:
            self._told_feed = True
            say(f"{ONLY_HERE}: standby nodes are not used")
        return left
