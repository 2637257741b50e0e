"""A training in miniature that one node spoils: its numbers become NaN, and so does every loss.

As with a GPU that computes wrongly, all ranks see it at the same step, and none is to blame by
its looks. The world is pp=2,dp=N/2. Each step all ranks add up a number through rank 0. In a
replay (ROBUST_REPLAY) it starts anew, does few steps, reads and saves nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import struct
import time
from pathlib import Path

import robust_slurm

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--bad", default="", help="node names, a,b")
parser.add_argument("--at", type=int, default=8, help="step from which on they spoil the job")
parser.add_argument("--raise", dest="raises", action="store_true", help="end by an error on NaN")
parser.add_argument("--quietly", action="store_true", help="in a replay a wrong number, not NaN")
args = parser.parse_args()
replay = os.environ.get("ROBUST_REPLAY") == "1"
steps = int(os.environ["ROBUST_REPLAY_STEPS"]) if replay else args.steps
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert world % 2 == 0
bad = os.environ["SLURMD_NODENAME"] in args.bad.split(",")
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
checkpoint = args.dir / "checkpoint.json"
if replay:
    with (args.dir / f"replays.{os.environ['ROBUST_EPOCH']}").open("a") as log:
        log.write(f"{os.environ['ROBUST_REPLAY_GROUP']} {rank} {os.environ['SLURMD_NODENAME']}\n")


def receive(sock: socket.socket) -> float:
    data = sock.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        raise ConnectionError("Connection closed by peer")
    return float(struct.unpack("!d", data)[0])


def connect() -> list[socket.socket]:
    if rank == 0:
        with socket.create_server(("", address[1]), backlog=world) as server:
            return [server.accept()[0] for _ in range(world - 1)]
    deadline = time.monotonic() + 60
    while True:
        try:
            return [socket.create_connection(address, timeout=30)]
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def total(value: float) -> float:
    if rank:
        peers[0].sendall(struct.pack("!d", value))
        return receive(peers[0])
    found = value + sum(receive(sock) for sock in peers)
    for sock in peers:
        sock.sendall(struct.pack("!d", found))
    return found


def own_number(step: int) -> float:
    if not bad or step < (2 if replay else args.at):
        return step / 4
    return step / 4 + 2**-40 if replay and args.quietly else math.nan


state = {"step": 0, "loss": 1.0}
if not replay and checkpoint.exists():
    state = json.loads(checkpoint.read_text())
step, loss = int(state["step"]), float(state["loss"])
peers = connect()
while step < steps:
    step += 1
    time.sleep(0.03)
    loss = loss / 2 + total(own_number(step))
    if args.raises and math.isnan(loss):
        raise FloatingPointError("the loss is nan")
    robust_slurm.beat(step, loss=loss)
    if rank == 0 and not replay:
        print(f"step {step} loss {loss!r}", flush=True)
        if step % 5 == 0 and not math.isnan(loss):
            temporary = checkpoint.with_suffix(".tmp")
            temporary.write_text(json.dumps({"step": step, "loss": loss}))
            temporary.replace(checkpoint)
if rank == 0 and not replay:
    (args.dir / "final.json").write_text(json.dumps({"step": step, "loss": loss}))
