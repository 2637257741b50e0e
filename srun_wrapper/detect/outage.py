"""Shared causes of silence: hosts outside the job that still answer, and messages to the user."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from robust_slurm.slurm import Slurm, SlurmError
from srun_wrapper.decide.shared_cause import SharedEvent
from srun_wrapper.job.model import AgentKey
from srun_wrapper.protocol.server import probe
from srun_wrapper.run_in_thread import run_in_thread

ANSWER = 0.75  # s for a host to answer, with a second and a third attempt in between
ATTEMPTS = (0.25, 0.5)
SLURM = 10.0  # s for Slurm to answer
DISCARD = 9  # port that nobody listens on: a live gateway refuses
NETWORK = Path("/sys/class/net")
ROUTES = Path("/proc/net/route")

Host = tuple[str, str, int]  # what it is, address, port


class OutsideHosts:
    """Hosts outside the job, which tell an outage of the supervisor's own network from a dead peer.

    Only hosts that have answered while all was well count.
    """

    def __init__(self) -> None:
        self.answered = float("-inf")  # when one of them last did
        self.hosts: list[Host] = []
        self._carriers: set[str] = set()
        self._asking: asyncio.Task[None] | None = None

    async def learn(self, slurm: Slurm) -> None:
        self._carriers = carriers()
        found = gateways()
        with contextlib.suppress(SlurmError, TimeoutError):
            found += controllers(await run_in_thread(slurm.config, SLURM))
        with contextlib.suppress(TimeoutError):
            found = await run_in_thread(lambda: _others(found), SLURM)
        answers = [await self._answers(host) for host in found]
        self.hosts = [host for host, alive in answers if alive]

    def ask(self, since: float) -> None:
        """Ask the hosts, unless one has answered after ``since``; an answer sets ``answered``."""
        busy = self._asking is not None and not self._asking.done()
        if self.hosts and not busy and self.answered <= since:
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        for each in asyncio.as_completed([self._answers(host) for host in self.hosts]):
            _, alive = await each
            if alive:
                self.answered = time.monotonic()

    async def _answers(self, host: Host) -> tuple[Host, bool]:
        _, address, port = host
        return host, await probe(address, port, ANSWER, ATTEMPTS) != "unreachable"

    async def missing(self, slurm: Slurm) -> list[str]:
        """Name what else does not work, for the user."""
        found = [f"no carrier on {name}" for name in sorted(self._carriers - carriers())]
        answers = await asyncio.gather(*(self._answers(host) for host in self.hosts))
        found += [
            f"{what} ({address}) is unreachable" for (what, address, _), ok in answers if not ok
        ]
        if not found:
            try:
                up = await run_in_thread(slurm.ping, SLURM)
            except TimeoutError:
                up = False
            found += [] if up else ["slurmctld does not answer"]
        return found


def controllers(config: Mapping[str, str]) -> list[Host]:
    """Return slurmctld's hosts from ``scontrol show config``."""
    port = re.match(r"\d+", config.get("SlurmctldPort", ""))
    hosts = [value for name, value in config.items() if name.startswith("SlurmctldHost")]
    matches = [re.fullmatch(r"([^()\s]+)(?:\(([^()\s]+)\))?", value) for value in hosts]
    if port is None:
        return []
    return [("slurmctld's host", m[2] or m[1], int(port[0])) for m in matches if m]


def gateways(routes: Path = ROUTES) -> list[Host]:
    """Return the default gateways of this host (IPv4)."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return []
    raw = {row[2] for row in rows if len(row) > 2 and row[1] == "00000000" != row[2]}
    addresses = (socket.inet_ntoa(struct.pack("<I", int(each, 16))) for each in sorted(raw))
    return [("the gateway", address, DISCARD) for address in addresses]


def carriers(network: Path = NETWORK) -> set[str]:
    """Return the interfaces of this host that have a carrier."""
    found = set()
    for path in network.glob("*/carrier"):
        with contextlib.suppress(OSError):  # the interface is switched off
            if path.parent.name != "lo" and path.read_text().strip() == "1":
                found.add(path.parent.name)
    return found


def _others(hosts: list[Host]) -> list[Host]:
    """Return those that are not this very host, which shows nothing about the network.

    Blocks while names are looked up.
    """
    found = []
    for what, name, port in hosts:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((name, port))  # sends nothing
            address = sock.getpeername()[0]
            if address != sock.getsockname()[0]:
                found.append((what, address, port))
    return found


def begins(event: SharedEvent[AgentKey], names: str, limit: float, setting: str) -> str:
    """The message when a shared cause is seen."""
    unreachable = event.kind == "unreachable"
    silent = "cannot be reached" if unreachable else "are silent though their kernels answer"
    return (
        f"{names} {silent} ({event.why}): a shared cause, not bad nodes; waiting up to "
        f"{limit:g} s for its end ({setting})"
    )


def expires(event: SharedEvent[AgentKey], names: str, now: float) -> str:
    """The message when it has lasted too long."""
    return (
        f"{names} still silent after {now - event.began:.0f} s: they are replaced but not reported "
        "as bad; check what they share (switch, power, file system)"
    )


def ends(event: SharedEvent[AgentKey], names: str, now: float) -> str:
    """The message when it is over."""
    return f"the shared cause that made {names} silent is over after {now - event.began:.1f} s"
