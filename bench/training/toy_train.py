"""Workload ``toy``: a training in miniature without ``import torch``.

Real processes and sockets: every step all ranks exchange a number through rank 0, as an
all-reduce does, and report the step; rank 0 saves a checkpoint every few steps. What is left of a
restart's time is the launcher's own. Runs under srun, robust-srun and torchrun.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time

import robust_slurm
from bench.training.rank import Rank, atomic_write, parse

CONNECT_S = 60.0


def main() -> None:
    args = parse()
    rank = Rank(args.dir)
    checkpoint = args.dir / "checkpoint.json"
    step, loss = 0, 1.0
    if checkpoint.exists():
        step, loss = json.loads(checkpoint.read_text())
    peers = connect(rank)
    while step < args.steps:
        began = time.perf_counter()
        time.sleep(args.step_time)
        step += 1
        loss = loss * 0.99 + all_reduce(rank, peers, (rank.rank + 1) * step) * 1e-6
        robust_slurm.beat(step, loss=loss)
        rank.stepped(step, time.perf_counter() - began)
        if rank.rank == 0 and step % args.save == 0:
            atomic_write(checkpoint, json.dumps([step, loss]).encode())
    rank.done()


def connect(rank: Rank) -> list[socket.socket]:
    """Rank 0: one socket per other rank, in their order; the others: one socket to rank 0."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank.rank == 0:
        with socket.create_server(("", address[1]), backlog=rank.world) as server:
            server.settimeout(CONNECT_S)
            peers: dict[int, socket.socket] = {}
            while len(peers) < rank.world - 1:
                sock, _ = server.accept()
                peers[struct.unpack("!i", sock.recv(4, socket.MSG_WAITALL))[0]] = sock
            found = [peers[r] for r in sorted(peers)]
    else:
        sock = _reach(address)
        sock.sendall(struct.pack("!i", rank.rank))
        found = [sock]
    for sock in found:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _reach(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def receive(sock: socket.socket) -> float:
    """One number. ConnectionError when the other side has ended."""
    data = sock.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        raise ConnectionError("Connection closed by peer")
    return float(struct.unpack("!d", data)[0])


def all_reduce(rank: Rank, peers: list[socket.socket], value: float) -> float:
    """The sum over all ranks."""
    if rank.rank == 0:
        total = value + sum(receive(sock) for sock in peers)
        for sock in peers:
            sock.sendall(struct.pack("!d", total))
        return total
    peers[0].sendall(struct.pack("!d", value))
    return receive(peers[0])


if __name__ == "__main__":
    main()
