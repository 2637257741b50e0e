"""The means that the ladder may count on: spares, standby nodes, a requeue."""

from __future__ import annotations

from collections.abc import Callable

from srun_wrapper.command import steps
from srun_wrapper.command.input_rules import ONLY_HERE, limited
from srun_wrapper.decide.bounds import Copies
from srun_wrapper.decide.ladder import Means
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.recover.reports import Reports
from srun_wrapper.recover.standby.nodes import MOST_UNFIT
from srun_wrapper.recover.standby.request import MAX_STANDBY_NODES


class AvailableMeans:
    """Counts what is left, and remembers nodes that joined and could not start a rank."""

    def __init__(
        self,
        state: JobState,
        launch: steps.Launch,
        reports: Reports,
        copies: Callable[[], Copies],
    ) -> None:
        """``copies``: see ``Means``."""
        self._state = state
        self._reports = reports
        self._copies = copies
        self._config = state.config
        self._launch = launch
        self._unfit: set[str] = set()  # came, and could not start a rank
        self._told_feed = False

    def unfit(self, names: tuple[str, ...]) -> None:
        """Newcomers could not start a rank."""
        self._unfit.update(names)

    def now(self, standby_nodes: int | None = None) -> Means:
        """Return the means that the ladder may count on now."""
        if standby_nodes is None:
            some = self._config.standby_partition and len(self._unfit) < MOST_UNFIT
            standby_nodes = MAX_STANDBY_NODES if some else 0
        batch = self._launch.env.get("SLURM_JOB_BATCH_HOST") or self._launch.env.get("ENVIRONMENT")
        requeue = self._config.requeue == "auto" and bool(batch)
        spares = len(self._state.spares())
        before = {bad.node: int(bad.strength) for bad in self._reports.evidence()}
        means = Means(
            spares,
            standby_nodes,
            requeue,
            self._config.max_restarts,
            copies=self._copies(),
            before=before,
            stepped=self._state.progress.stepped,
        )
        had = [whole for n in self._state.world.places for whole in n.stdin.values()]
        left = limited(means, self._launch.feed, had)
        if left.companions < means.companions and not self._told_feed:
            self._told_feed = True
            say(f"{ONLY_HERE}: standby nodes are not used")
        return left
