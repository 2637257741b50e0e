"""A training in miniature, for fault tests: real processes and sockets, no torch import.

Every step all ranks exchange a number through rank 0 (as an all-reduce does), report the step,
and every ``--save`` steps rank 0 writes a checkpoint (atomic rename). The loss depends on every
step before it, so a wrong resume shows. Faults on command at the steps ``--at``: in the
epochs ``--epoch`` only (0: in all), on the node ``--node`` only, each but once with ``--once``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import robust_slurm

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--step-time", type=float, default=0.03)
parser.add_argument("--save", type=int, default=5)
parser.add_argument("--fault", default="")
numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
parser.add_argument("--hold", type=numbers, default=[], help="stay after each, once")
parser.add_argument("--at", type=numbers, default=[])
parser.add_argument("--rank", type=int, default=1, help="-1: all")
parser.add_argument("--epoch", type=numbers, default=[1])
parser.add_argument("--seconds", type=float, default=15.0)
parser.add_argument("--node", default="")
parser.add_argument("--once", action="store_true")
parser.add_argument("--words", type=Path, help="a file: the last words of --fault says")
parser.add_argument("--no-beat", action="store_true")
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--ahead", action="store_true")
parser.add_argument("--reads", type=Path, help="a file that is read at each step")
parser.add_argument("--data", default="", help="a plan of data by name, of which each step reads")
args = parser.parse_args()
if args.ahead:
    if "RANK" not in os.environ:
        (args.dir / f"ahead.{os.environ['SLURMD_NODENAME']}").write_text(str(os.getpid()))
    robust_slurm.standby_point()
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
node = os.environ["SLURMD_NODENAME"]
checkpoint = args.dir / "checkpoint.json"
HELD_PORT = 45111  # of the grandchild


def connect() -> list[socket.socket]:
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(("", address[1]), backlog=world) as server:
            server.settimeout(60)
            peers: dict[int, socket.socket] = {}
            while len(peers) < world - 1:
                sock, _ = server.accept()
                peers[struct.unpack("!i", sock.recv(4, socket.MSG_WAITALL))[0]] = sock
            return [peers[r] for r in sorted(peers)]
    deadline = time.monotonic() + 60
    while True:
        try:
            sock = socket.create_connection(address, timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    sock.settimeout(None)
    sock.sendall(struct.pack("!i", rank))
    return [sock]


def receive(sock: socket.socket) -> float:
    data = sock.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        time.sleep(1)  # whose fault it was is known first, also on a machine that is busy
        raise ConnectionError("Connection closed by peer")
    return float(struct.unpack("!d", data)[0])


def all_reduce(value: float) -> float:
    if rank == 0:
        total = value + sum(receive(sock) for sock in peers)
        for sock in peers:
            sock.sendall(struct.pack("!d", total))
        return total
    peers[0].sendall(struct.pack("!d", value))
    return receive(peers[0])


def fault(step: int) -> None:
    if not (args.fault and step in args.at and args.rank in (rank, -1)):
        return
    if args.epoch != [0] and robust_slurm.epoch() not in args.epoch:
        return
    if args.node and node != args.node:
        return
    if args.once:
        try:
            (args.dir / f"fired-{step}").touch(exist_ok=False)
        except FileExistsError:
            return
    if args.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif args.fault == "exit":
        sys.exit(3)
    elif args.fault == "raise":
        raise ValueError(f"bad sample {step}")
    elif args.fault == "ecc":
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    elif args.fault == "says":
        sys.stderr.write(args.words.read_text())
        sys.exit(1)
    elif args.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif args.fault == "hog":  # until the kernel ends it
        held = []
        while True:
            held.append(b"x" * (8 << 20))
    elif args.fault == "asleep":  # until a test has seen it
        (args.dir / f"asleep-{robust_slurm.epoch()}").touch()
        time.sleep(3600)
    elif args.fault == "sleep":
        time.sleep(3600)
    elif args.fault == "pause":
        time.sleep(args.seconds)
    elif args.fault == "phase":
        with robust_slurm.phase("eval"):
            time.sleep(args.seconds)
    elif args.fault == "busy":
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            pass
    elif args.fault == "grandchild":
        # Detached from our process group, ignores SIGTERM, keeps a port busy.
        code = (
            "import signal,socket,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);"
            f"s=socket.create_server(('',{HELD_PORT}));print('held',flush=True);time.sleep(3600)"
        )
        argv = [sys.executable, "-c", code, "grandchild"]
        child = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        os.kill(os.getpid(), signal.SIGKILL)


def holds(step: int) -> bool:
    """Told before the step is: whoever sees the step can rely on it."""
    held = args.dir / f"held-{step}"
    if step not in args.hold or held.exists():
        return False
    held.touch()
    return True


def read_data() -> int:
    """The sum of the checksums of this rank's batches of the step."""
    total = 0
    for share in loader.shares:
        began = time.monotonic()
        batch = next(loader)
        took = time.monotonic() - began
        crc = zlib.crc32(b"".join(batch[name].tobytes() for name in sorted(batch)))
        with (args.dir / f"order-{rank}").open("a") as file:
            print(step, share, crc, f"{took:.4f}", robust_slurm.epoch(), node, file=file)
        total += crc
    return total


if args.ignore_term:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.fault == "grandchild" and rank == args.rank:
    socket.create_server(("", HELD_PORT)).close()  # fails while an old grandchild holds it
state = {"step": 0, "loss": 1.0}
if checkpoint.exists():
    state = json.loads(checkpoint.read_text())
if args.data:
    os.environ["TOY_RECORDS"] = str(args.dir)
    sys.modules["torch"] = None  # type: ignore[assignment] # arrays as they are
    import numpy  # noqa: F401 - as a training has long done

    from robust_slurm.data.loader import Loader

    loader = Loader(args.data)
    loader.load_state_dict(state.get("data") or loader.state_dict())
peers = connect()
step, loss = int(state["step"]), float(state["loss"])
while step < args.steps:
    step += 1
    fault(step)
    time.sleep(args.step_time)
    if args.reads:
        args.reads.read_bytes()
    value = read_data() if args.data else (rank + 1) * step
    loss = loss * 0.99 + all_reduce(value) * 1e-6
    if not args.no_beat:
        robust_slurm.beat(step, loss=loss)
    if rank == 0:
        stay = holds(step)
        print(f"step {step} loss {loss!r}", flush=True)
        if step % args.save == 0:
            temporary = checkpoint.with_suffix(".tmp")
            position = {"data": loader.state_dict()} if args.data else {}
            temporary.write_text(json.dumps({"step": step, "loss": loss, **position}))
            temporary.replace(checkpoint)
        go_on = args.dir / "go-on", args.dir / f"go-on-{step}"
        while stay and not any(path.exists() for path in go_on):  # to be killed, or told to
            time.sleep(0.02)
if rank == 0:
    (args.dir / "final.json").write_text(json.dumps({"step": step, "loss": loss}))
if args.fault == "linger" and rank == args.rank:
    time.sleep(args.seconds)  # a last evaluation or upload, on one rank only
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
print(f"rank {rank} done on {node} in epoch {robust_slurm.epoch()} gpus {gpus}", flush=True)
