"""Which jobs have steps on this node, without asking Slurm.

Every slurmstepd listens on a socket in SlurmdSpoolDir, <node>_<job>.<step>, from before its step
starts until its last process is gone (src/common/stepd_api.c: that is how slurmd itself finds its
steps). A crash may leave a socket behind: then the node looks busier than it is, and less is held
against it.
"""

from __future__ import annotations

import re

from health import slurmconf
from health.system import System

_SOCKET = re.compile(r"_(\d+)\.\d+(?:\.\d+)?(?:\.ALT)?")


def running(system: System, conf: slurmconf.Conf | None = None) -> frozenset[int] | None:
    """Ids of the jobs with steps here, the context's own left out; None: cannot be told."""
    try:
        names = system.names(slurmconf.spool_dir(system, conf))
    except OSError:
        return None
    node, jobs = system.context.node, set()
    for name in names:
        match = _SOCKET.fullmatch(name, len(node)) if name.startswith(node) else None
        if match:
            jobs.add(int(match[1]))
    return frozenset(jobs - {system.context.job})
