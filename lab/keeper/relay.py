"""A relay in a node's link that delays and drops frames: netem, for kernels that have none.

It sits between the node's switch port and the switch: the port moves to a bridge of its own, and a
process copies frames between a tap device there and another one on the switch, in both directions.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Self

from lab import inside
from lab.errors import LabError

_DEVICE = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME = 1 << 16
_MOST_WAITING = 20_000  # frames; more are dropped, as by any queue

Ip = Callable[[list[str]], None]


@dataclass
class Relay:
    """The relay of one port, and its process."""

    port: str
    process: int

    @classmethod
    def make(cls, ip: Ip, port: str, switch: str, delay: float, loss: float) -> Self:
        """Put a relay between `port` and `switch`.

        `delay`: seconds, in each direction; `loss`: the share of frames that is dropped.
        """
        if not 0 <= delay <= 10 or not 0 <= loss <= 1:
            raise LabError("want a delay of 0 to 10000 ms and a loss of 0 to 100 %")
        outer, own = _tap(f"o{port}"), _tap(f"i{port}")
        ip(
            [
                f"link add x{port} type bridge",
                f"link set x{port} up",
                f"link set i{port} master x{port} up",
                f"link set o{port} master {switch} up",
                f"link set {port} master x{port}",
            ]
        )
        process = os.fork()
        if process == 0:
            try:
                inside.leave_keeper(outer, own)
                os.setsid()
                _copy([outer, own], delay, loss)
            finally:
                os._exit(1)
        os.close(outer)
        os.close(own)
        return cls(port, process)

    def end(self, ip: Ip, switch: str, port_lives: bool) -> None:
        """End the relay; the port goes back to the switch."""
        try:
            os.kill(self.process, signal.SIGKILL)  # its tap devices go with it
            os.waitpid(self.process, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        back = [f"link set {self.port} master {switch}"] if port_lives else []
        ip([*back, f"link del x{self.port}"])


def _tap(name: str) -> int:
    try:
        fd = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"{_DEVICE}: {error.strerror}; try: modprobe tun") from None
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def _copy(taps: Sequence[int], delay: float, loss: float) -> NoReturn:
    waiting: list[tuple[float, int, int, bytes]] = []  # due, in order, to, frame
    number = 0
    poller = select.poll()
    for tap in taps:
        poller.register(tap, select.POLLIN)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = poller.poll(None if left is None else left * 1000)
        now = time.monotonic()
        for fd, _ in ready:
            frame = os.read(fd, _FRAME)
            if random.random() >= loss and len(waiting) < _MOST_WAITING:
                number += 1
                to = taps[1] if fd == taps[0] else taps[0]
                heapq.heappush(waiting, (now + delay, number, to, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(waiting)
            try:
                os.write(to, frame)
            except OSError:  # the link is down: lost, as on a wire
                pass
