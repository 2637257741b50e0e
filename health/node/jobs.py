"""The jobs with steps on this node, found without asking Slurm.

Every slurmstepd listens on a socket in SlurmdSpoolDir, <node>_<job>.<step>, from before its step
starts until its last process is gone (src/common/stepd_api.c: that is how slurmd itself finds its
steps). A crash may leave a socket behind: then the node looks busier than it is, and some checks
report less.
"""

from __future__ import annotations

import re

from health.node import slurmconf
from health.node.silent import call_on
from health.node.system import System

UNKNOWN = -1  # a job of which nothing is known
_LOOK_S = 1.0
_SOCKET = re.compile(r"_(\d+)\.\d+(?:\.\d+)?(?:\.ALT)?")


def maybe(system: System) -> frozenset[int]:
    """The jobs here besides the context's; UNKNOWN where there may be any, of anybody.

    Looked up in a child: slurm.conf may lie on a file system that does not answer.
    """
    conf = system.context.env.get("SLURM_CONF", slurmconf.PLACES[0])
    found, error = call_on(conf, lambda: _sorted(running(system)), _LOOK_S)
    return frozenset({UNKNOWN}) if error or found is None else frozenset(found)


def _sorted(found: frozenset[int] | None) -> list[int] | None:
    return None if found is None else sorted(found)


def running(system: System) -> frozenset[int] | None:
    """Ids of the jobs with steps here, the context's own left out; None: cannot be told."""
    try:
        names = system.names(slurmconf.spool_dir(system))
    except OSError:
        return None
    node, jobs = system.context.node, set()
    for name in names:
        match = _SOCKET.fullmatch(name, len(node)) if name.startswith(node) else None
        if match:
            jobs.add(int(match[1]))
    return frozenset(jobs - {system.context.job})
