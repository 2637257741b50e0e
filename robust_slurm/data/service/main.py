"""The data process's program. robust-task starts it in the ranks' interpreter, by its path.

Its orders are on stdin, a JSON object: ``name`` of the plan, ``code`` (the version that the rank
has seen), ``path`` (sys.path of the rank that has asked for it), ``listen`` (descriptor of its
socket), ``memory`` in bytes, ``exchange`` (the descriptor of the socket for other nodes and their
key, or null), ``figures`` (path of the file for them, or none: ``figures.py``).
"""

from __future__ import annotations

import json
import os
import sys

FAILED = 3
"""The exit code when the plan cannot be made, or a source hangs: its ranks have been told, and the
next one that asks gets another process."""
NICE = 5
_SCORE = 300  # the kernel ends it before ranks when memory is short: nothing is lost with it
_FILES = 1 << 14
_SWITCH = 0.0005  # s for a thread that answers a rank to get the interpreter


def _be_nice() -> None:
    """Be a helper: behind the ranks, and out of reach of signals that are for them."""
    import contextlib
    import resource

    from robust_slurm.data.helper import become_helper

    become_helper("robust-data", _SCORE)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        wanted = _FILES if most == resource.RLIM_INFINITY else min(most, _FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    sys.setswitchinterval(_SWITCH)


def main() -> None:
    """Serve until killed, or until the plan turns out to be broken, or a source hangs."""
    order = json.loads(sys.stdin.read())
    sys.path[:] = order["path"]
    _be_nice()
    import socket

    from robust_slurm.data.service.producer import Producer
    from robust_slurm.data.service.ring import StepRing
    from robust_slurm.data.service.server import RankServer

    producer = Producer(StepRing(order["memory"]))
    server = RankServer(socket.socket(fileno=order["listen"]), producer)

    # Ranks are told to wait from now on; the rest of the imports takes longer.
    from robust_slurm.data.exchange.joining import Joining
    from robust_slurm.data.exchange.placement import VARIABLE
    from robust_slurm.data.lanes.use import SourceUse
    from robust_slurm.data.service.build import load
    from robust_slurm.data.service.figures import FiguresFile

    joining = Joining(order.get("exchange"))
    joining.place(os.environ.get(VARIABLE))  # as far as the first rank knew it
    server.tell_places(joining.place)
    use = SourceUse()
    if path := order.get("figures"):
        FiguresFile(path, producer.level, use, joining.figures).begin()
    os.nice(NICE)  # of this thread and those that it begins: not of those that answer ranks
    producer.run(lambda: load(order["name"], order["code"], joining, use, producer.waited))
    server.wait_told()
    sys.stderr.flush()
    os._exit(FAILED)


if __name__ == "__main__":
    main()
