"""Notes of the programs of bench.parity: which rank began on which node; and their all-reduce.

The same file serves under srun and under robust-srun, so it reads what both give: Slurm's own
variables, and MASTER_ADDR and MASTER_PORT, which the batch script exports as users' scripts do.
"""

from __future__ import annotations

import os
import socket
import struct
import time

RANK, WORLD = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))


def started() -> None:
    """Note that this rank begins on this node."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    line = f"{os.environ.get('SLURM_JOB_ID', '')} {RANK} {node}\n"
    with open(os.environ["PARITY_RANKS"], "a", encoding="utf-8") as file:
        file.write(line)


class Together:
    """An all-reduce through rank 0."""

    def __init__(self) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers = _listen(address[1]) if RANK == 0 else [_reach(address)]

    def all_reduce(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        if RANK:
            self.peers[0].sendall(struct.pack("!d", value))
            return _receive(self.peers[0])
        total = value + sum(_receive(peer) for peer in self.peers)
        for peer in self.peers:
            peer.sendall(struct.pack("!d", total))
        return total

    def close(self) -> None:
        """Close the connections."""
        for peer in self.peers:
            peer.close()


def _listen(port: int) -> list[socket.socket]:
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("", port), backlog=WORLD) as server:
        server.settimeout(300)
        while len(peers) < WORLD - 1:
            peer, _ = server.accept()
            peers[struct.unpack("!i", peer.recv(4, socket.MSG_WAITALL))[0]] = peer
    return [peers[rank] for rank in sorted(peers)]


def _reach(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 300
    while True:
        try:
            made = socket.create_connection(address, timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    made.settimeout(None)
    made.sendall(struct.pack("!i", RANK))
    return made


def _receive(peer: socket.socket) -> float:
    data = peer.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        raise ConnectionError("Connection closed by peer")
    return float(struct.unpack("!d", data)[0])
