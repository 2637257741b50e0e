"""Data processes of other nodes, for tests: started by forking this program, killed by the test.

Orders come on stdin, a JSON object a line: [place, descriptor of its listening socket]. It answers
with the pid. All nodes have the same three sources of the module's making.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from typing import Any

from listed_source import ListedSource, Record

from robust_slurm.data.exchange import server
from robust_slurm.data.exchange.node import Exchange
from robust_slurm.data.lanes.budget import ReadBudget
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.local import LocalFeed

KEY = b"k" * 32
PLAN = "the plan"
LANES = [(source, lane) for source in ("code", "math", "web") for lane in range(2)]
WINDOW = 8


def source_of(name: str) -> ListedSource:
    first = {"code": 0, "math": 1 << 20, "web": 1 << 21}[name]
    parts: list[list[Record]] = [
        [first + 1000 * part + record for record in range(40 + 7 * part)] for part in range(5)
    ]
    return ListedSource(parts, window=WINDOW, patience=60.0)


def open_lane(lane: tuple[str, int]) -> LocalFeed:
    name, number = lane
    return LocalFeed(SourceLane(source_of(name), name, number, 2, 7, WINDOW), ReadBudget(1 << 18))


def exchange(listener: socket.socket, **more: Any) -> Exchange:
    given = {"key": KEY, "plan": PLAN, "memory": 1 << 16, **more}
    return Exchange(open_lane, LANES, listener, **given)


def main() -> None:
    server.BEAT = 0.1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        place, descriptor, nodes = json.loads(line)
        pid = os.fork()
        if pid == 0:
            node = exchange(socket.socket(fileno=descriptor))
            node.place(place, [tuple(each) for each in nodes])
            threading.Event().wait()
        print(pid, flush=True)


if __name__ == "__main__":
    main()
