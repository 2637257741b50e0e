"""Standby nodes are requested before they are needed: while nodes are in doubt."""

from __future__ import annotations

from collections.abc import Callable

from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.membership import Membership
from srun_wrapper.job.model import Role
from srun_wrapper.recover.standby.asking import StandbyRequests
from srun_wrapper.recover.standby.request import MAX_STANDBY_NODES


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

    def for_doubtful(self, now: float) -> None:
        """Request standby nodes while nodes are in doubt; called all the time while the job runs.

        Not when the step is being ended, nor when more fall silent than could be replaced: then
        it is rather this host that hears nobody.
        """
        watch = self._node_watch
        doubtful = {
            place: node.name
            for place, node in enumerate(self._world.places)
            if node.role is Role.ACTIVE and watch.doubted(node, now)
        }
        over = self._over() or watch.seems_shared(now)
        self._request({} if over or len(doubtful) > MAX_STANDBY_NODES else doubtful)

    def for_vacant(self) -> None:
        """Request standby nodes for the vacant places now: to end the ranks takes time as well."""
        places = enumerate(self._world.places)
        self._request({place: node.name for place, node in places if node.gone})

    def _request(self, leaving: dict[int, str]) -> None:
        wanted = sorted((len(self._world.ranks[p]), name) for p, name in leaving.items())
        if not self._over():
            wanted += [(ranks, "") for ranks in self._lacking()]
        self._requests.prerequest(wanted[len(self._members.spares()) :], list(leaving.values()))
