"""One end of a connection between a rank and its data process."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading

from robust_slurm.data.service import wire


def test_a_line_waits_for_its_reader_whatever_number_its_descriptor_has() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    left, right = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(left, fcntl.F_DUPFD_CLOEXEC, 2000))
    ends = wire.LineSocket(high), wire.LineSocket(right)
    message = {"op": "x", "text": "x" * (1 << 20)}
    sender = threading.Thread(target=ends[0].send, args=(message,))
    sender.start()
    assert ends[1].receive(20) == (message, [])
    sender.join()
    for each in (*ends, left):
        each.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_received_is_not_for_programs_that_a_training_starts() -> None:
    ends = [wire.LineSocket(end) for end in socket.socketpair()]
    null = os.open("/dev/null", os.O_RDONLY)
    ends[0].send({"op": "step"}, [null, null])
    got = ends[1].receive(20)
    assert got is not None and [os.get_inheritable(fd) for fd in got[1]] == [False, False]
    for fd in (null, *got[1]):
        os.close(fd)
    for each in ends:
        each.close()
