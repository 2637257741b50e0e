"""Standby nodes are requested before they are needed: while nodes are in doubt."""

from __future__ import annotations

import time
from collections.abc import Callable

from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.membership import Membership
from srun_wrapper.job.model import Role
from srun_wrapper.recover.standby.asking import AGAIN, StandbyRequests
from srun_wrapper.recover.standby.request import MAX_STANDBY_NODES

LONGEST = 300.0  # s until Slurm is asked again for nodes without which the job goes on


class Prerequest:
    """Requests standby nodes for places that may become vacant, or have just become so."""

    def __init__(
        self,
        members: Membership,
        requests: StandbyRequests,
        node_watch: NodeWatch,
        over: Callable[[], bool],
        lacking: Callable[[], list[int]] = list,
    ) -> None:
        """``over``: True if the step is being ended, or has ended; ``lacking``: numbers of ranks
        of the places that the job goes on without."""
        self._lacking = lacking
        self._members = members
        self._world = members.world
        self._requests = requests
        self._node_watch = node_watch
        self._over = over
        self._next = 0.0  # when places that lack a node are looked at again
        self._pause = 0.0

    def for_doubtful(self, now: float) -> None:
        """Request standby nodes while nodes are in doubt; called all the time while the job runs.

        None when the step is being ended, or when more nodes fall silent than could be replaced:
        then the cause is rather at this host. While a shared cause is only suspected, no request is
        made or withdrawn: one that is made again may preempt a second job of another user.
        """
        watch = self._node_watch
        doubtful = {
            place: node.name
            for place, node in enumerate(self._world.places)
            if node.role is Role.ACTIVE and watch.doubted(node, now) and not watch.steps_on(node)
        }
        over = self._over() or watch.is_shared()
        if over or len(doubtful) > MAX_STANDBY_NODES:
            doubtful = {}
        elif doubtful and watch.seems_shared(now):
            return
        self._request(doubtful)

    def for_vacant(self) -> None:
        """Request standby nodes for the vacant places now, while the ranks are being ended."""
        places = enumerate(self._world.places)
        self._request({place: node.name for place, node in places if node.gone})

    def _request(self, leaving: dict[int, str]) -> None:
        wanted = sorted((len(self._world.ranks[p]), name) for p, name in leaving.items())
        lacking = [] if self._over() else self._lacking()
        if leaving or not lacking:
            self._next = self._pause = 0.0
        elif (now := time.monotonic()) < self._next:
            return  # what was asked for waits in Slurm's queue, or Slurm has refused it
        else:
            self._pause = min(LONGEST, 2 * self._pause or AGAIN)
            self._next = now + self._pause
        wanted += [(ranks, "") for ranks in lacking]
        self._requests.prerequest(wanted[len(self._members.spares()) :], list(leaving.values()))
