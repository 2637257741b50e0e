"""The keeper: PID 1 of a lab; it owns the switch and the nodes and makes the faults.

Its death takes the whole lab with it, by the kernel: PID namespaces nest, and network and mount
namespaces have no other holder. The reaper (lab/keeper/reaper.py) is its parent on the host.
"""

import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lab import inside, linux
from lab.errors import LabError
from lab.keeper import network, node, outages, ranks
from lab.keeper.lab_node import LabNode
from lab.keeper.mounts import Cover, host_children, host_is_closed, plan_covers
from lab.keeper.relay import Relay
from lab.machine.gear import Gear
from lab.slurm.logs import complaints
from lab.spec import HEAD, LabSpec, address

_WAIT_S = 10.0
_DIES_S = 25.0  # a killed process of the lowest priority dies when it gets a core
_BATCH = 64  # nodes that boot at a time: each holds a descriptor and two processes meanwhile
# Uptime of nodes as the lab comes up. slurmctld computes the boot time from it and from the arrival
# of the message: one that is later by more makes it take the node for rebooted and kill its jobs.
FIRST_AGE_S = 600.0


class Keeper:
    """Boots nodes and makes faults, as lab/keeper/control.py requests them."""

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.nodes = {name: LabNode(name, i) for i, name in enumerate(spec.all_names)}
        self.covers: list[Cover] = plan_covers(spec.visible, host_is_closed, host_children)
        self.links: dict[str, socket.socket] = {}

    # -- building ---------------------------------------------------------------------------

    def build(self) -> None:
        """Bring all of the lab up; return when every node's daemons are started."""
        network.build(self.spec.routed)
        every = list(self.nodes.values())  # the head is the first
        for begin in range(0, len(every), _BATCH):
            self._boot(every[begin : begin + _BATCH])

    def _boot(self, fresh: list[LabNode]) -> None:
        for one in fresh:
            one.boots += 1
            one.cut = one.stopped = one.paused = one.slowed = False
            one.daemons.clear()
            age = FIRST_AGE_S if one.boots == 1 else 0.0
            bare = self.spec.kernel or one.name == HEAD
            one.gear = None if bare else Gear(self.spec, one.name, age)
            one.pid, self.links[one.name] = node.spawn(self.spec, one.name, self.covers, age)
        routed = self.spec.routed
        made = [network.port_lines(routed, n.port, n.name, address(n.name), n.pid) for n in fresh]
        network.run_ip([line for lines in made for line in lines])
        for one in fresh:
            self._expect(one, b"view")
            if one.gear:
                one.gear.booted(one.pid)
            if one.name == HEAD:  # the others register with its controller at their start
                self.links[HEAD].send(b"go")
                self._expect(one, b"ready")
        for one in fresh:
            if one.name != HEAD:
                self.links[one.name].send(b"go")
        for one in fresh:
            if one.name != HEAD:
                self._expect(one, b"ready")
            self.links.pop(one.name).close()

    def _expect(self, one: LabNode, word: bytes) -> None:
        got = self.links[one.name].recv(4096)
        if got != word:
            text = got.decode(errors="replace") or "its first process ended"
            raise LabError(f"node {one.name} did not start: {text}{complaints(self.spec)}")

    # -- faults -----------------------------------------------------------------------------

    def crash(self, one: LabNode) -> dict[str, Any]:
        """Link down, then every process of the node gone; the time is from just before."""
        one.must_run()
        at = time.time()
        if not one.cut:
            linux.set_link(one.port, False)
        space = Path(f"/proc/{one.pid}/ns/pid").readlink()
        os.kill(one.pid, signal.SIGKILL)
        if one.gear and one.gear.mounts:
            # A process that waits for a mount cannot die, and when it wakes up it must not run on.
            inside.kill_all(space)
            one.gear.end()
        self._buried(one)
        return {"time": at}

    def _buried(self, one: LabNode) -> None:
        # The wait ends when the kernel has killed and reaped all of the node's namespace.
        fd = os.pidfd_open(one.pid)
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            gone = selector.select(_DIES_S)
        os.close(fd)
        if not gone:
            raise LabError(f"{one.name}: a process of it does not die (in a system call?)")
        self._forget(one)

    def _forget(self, one: LabNode) -> None:
        for fd in one.stopped_ranks.values():
            os.close(fd)
        one.stopped_ranks.clear()
        if one.gear:
            one.gear.end()
        self._end_relay(one, port_lives=False)
        one.pid, one.died, one.back_at = 0, time.time(), math.inf

    def hang(self, one: LabNode) -> dict[str, Any]:
        """SIGSTOP to all processes of the node at once; its kernel still answers."""
        one.must_run()
        at = time.time()
        os.kill(one.pid, node.STOP_ALL)
        one.stopped = True
        return {"time": at}

    def hang_rank(self, job: str, rank: str) -> dict[str, Any]:
        """SIGSTOP to the processes of one rank, parents first."""
        pids = ranks.pick_rank(ranks.scan(), job, rank)
        if not pids:
            raise LabError(f"job {job} has no process of rank {rank} in this lab now")
        one = self._node_of(pids[0])
        at = time.time()
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
                signal.pidfd_send_signal(fd, signal.SIGSTOP)
            except ProcessLookupError:
                continue
            one.stopped_ranks[pid] = fd
        return {"time": at, "node": one.name, "pids": pids}

    def _node_of(self, pid: int) -> LabNode:
        space = Path(f"/proc/{pid}/ns/pid").readlink()
        for one in self.nodes.values():
            if one.pid and Path(f"/proc/{one.pid}/ns/pid").readlink() == space:
                return one
        raise LabError(f"process {pid} is in no node")

    def partition(self, one: LabNode) -> dict[str, Any]:
        """Take down the node's link, and no more."""
        one.must_run()
        at = time.time()
        outages.cut(one)
        return {"time": at}

    def slow(self, one: LabNode, rate: str, delay: float, loss: float) -> dict[str, Any]:
        """Limit what goes to the node to `rate`, as tc writes it (100mbit); "": do not.

        `delay` (seconds, per direction) and `loss` (a share) are for both directions.
        """
        one.must_run()
        if self.spec.routed and (delay or loss):
            raise LabError("no delay or loss in a lab of this size: its nodes have no switch")
        at = time.time()
        if rate:
            _tc(f"replace dev {one.port} root tbf rate {rate} burst 256kb latency 100ms")
            one.slowed = True
        if delay or loss:
            self._end_relay(one)
            one.relay = Relay.make(network.run_ip, one.port, network.BRIDGE, delay, loss)
        return {"time": at}

    def _end_relay(self, one: LabNode, port_lives: bool = True) -> None:
        if one.relay is not None:
            one.relay.end(network.run_ip, network.BRIDGE, port_lives)
            one.relay = None

    def heal(self, one: LabNode) -> dict[str, Any]:
        """Undo what was done to a node; a crashed one boots with nothing left of its past."""
        was = one.state
        at = time.time()
        if not one.pid:
            self._boot([one])
        elif one.gear:
            one.gear.heal()
        outages.restore(one)
        outages.thaw_all(one)
        if one.stopped:
            os.kill(one.pid, node.CONTINUE_ALL)
            one.stopped = False
        for fd in one.stopped_ranks.values():
            try:
                signal.pidfd_send_signal(fd, signal.SIGCONT)
            except ProcessLookupError:
                pass
            os.close(fd)
        one.stopped_ranks.clear()
        self._end_relay(one)
        if one.slowed:
            _tc(f"del dev {one.port} root")
            one.slowed = False
        return {"time": at, "was": was, "stopped": list(one.daemons)}

    # -- the nodes --------------------------------------------------------------------------

    def reap(self) -> None:
        """Reap what has ended: orphans of the nodes, and nodes."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for one in self.nodes.values():
                if one.pid == pid:
                    print(f"node {one.name} died, wait status {status}", file=sys.stderr)
                    self._forget(one)


def _tc(words: str) -> None:
    argv = ["tc", "qdisc", *words.split()]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=_WAIT_S)
    if result.returncode != 0:
        raise LabError(f"{' '.join(argv)}: {result.stderr.strip()}")
