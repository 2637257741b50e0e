"""The program that makes readers: it imports the plan once, and forks one whenever it is told to.

It has one thread, so that its children find no lock that is held for good, and share its memory.
Its orders come on the socket whose descriptor is its argument. At its end all readers are killed.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robust_slurm.data.plan import Plan
    from robust_slurm.data.service.readers.places import SharedPlaces
    from robust_slurm.data.service.wire import LineSocket

LOOK = 0.5  # s between two looks at who has ended
SCORE = 400  # before the data process, when memory is short


class _Readers:
    """The readers that this process has forked; ``line``: to the data process."""

    def __init__(self, plan: Plan, line: LineSocket, places: SharedPlaces) -> None:
        self._plan, self._line, self._places = plan, line, places
        self._pids: dict[int, int] = {}  # by the reader's serial number

    def obey(self, message: dict[str, Any], fds: list[int]) -> None:
        """Do what the data process says."""
        if message["op"] == "start":
            self._start(message["serial"], message["number"], fds[0])
        elif message["op"] == "kill" and message["serial"] in self._pids:
            os.kill(self._pids[message["serial"]], signal.SIGKILL)
        elif message["op"] == "cpus":
            for pid in (0, *self._pids.values()):
                try:
                    os.sched_setaffinity(pid, message["cpus"])
                except OSError:
                    pass  # they are not to be had any more
        for fd in fds:
            os.close(fd)

    def reap(self) -> None:
        """Tell who has ended, and how."""
        for serial, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[serial]
                how = os.waitstatus_to_exitcode(status)
                self._line.send({"op": "ended", "serial": serial, "code": how})

    def _start(self, serial: int, number: int, fd: int) -> None:
        mine = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            return  # its end of the line is closed: it is tried again
        if pid == 0:
            try:
                self._read(mine, number, fd)
            except OSError:
                pass  # the data process has gone
            finally:
                os._exit(0)
        self._pids[serial] = pid

    def _read(self, parent: int, number: int, fd: int) -> None:
        from robust_slurm.data.helper import become_helper, end_with_parent, use_one_heap
        from robust_slurm.data.service.readers.reader import WindowReader
        from robust_slurm.data.service.wire import LineSocket

        end_with_parent()
        if os.getppid() != parent:
            return
        become_helper("robust-reader", SCORE)
        use_one_heap()
        self._line.close()
        line = LineSocket(socket.socket(fileno=fd))
        WindowReader(self._plan, line, self._places, number).serve()


def main() -> None:
    """Serve until the data process has gone."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sys.path[:] = sys.argv[2:]

    from robust_slurm.data.helper import become_helper, end_with_parent
    from robust_slurm.data.named import plan_named
    from robust_slurm.data.service.client import expect_code
    from robust_slurm.data.service.readers.places import SharedPlaces
    from robust_slurm.data.service.readers.reader import lanes_of
    from robust_slurm.data.service.wanted import as_text, digest
    from robust_slurm.data.service.wire import LineSocket

    end_with_parent()
    become_helper("robust-readers", SCORE)
    line = LineSocket(sock)
    try:
        order, fds = line.receive(None) or ({}, [])
        plan = plan_named(order["name"])
        expect_code(order["name"], order["code"])
        places = SharedPlaces(len(lanes_of(plan)), fds[0])
        line.send({"op": "ready", "plan": digest(as_text(plan.fingerprint()))})
        gc.collect()
        gc.freeze()  # else the children's first collection would copy all of it
        readers = _Readers(plan, line, places)
        while True:
            told = line.receive(LOOK)
            if told is not None:
                readers.obey(*told)
            readers.reap()
    except OSError:
        pass  # the data process has gone
    os._exit(0)


if __name__ == "__main__":
    main()
