"""The training of bench.chaos: a toy with the habits that recoveries meet in real scripts.

It imports nothing of the benchmark, so a copy of this file on a file system that stalls is all of
the program. Every step all ranks add their numbers through rank 0; the loss depends on every step,
so a wrong resume shows. Rank 0 writes the wall time of each step to ``steps`` in the directory.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import mmap
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import robust_slurm


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="shared directory of this run")
    add("--steps", type=int, default=120)
    add("--step-time", type=float, default=0.05)
    add("--save", type=int, default=5, help="steps between two checkpoints")
    add("--data", type=Path, help="read this file in every step")
    add("--print", action="store_true", help="print every step")
    add("--linger", type=float, default=0.0, help="rank r exits r times so many seconds later")
    add("--stdin", action="store_true", help="rank 0 takes a line of stdin in every step")
    add("--term-save", type=float, default=0.0, help="a SIGTERM handler saves for so many seconds")
    add("--map", type=Path, help="read this file, mapped, in every step")
    add("--error", default="", help="raise this text, or as _fail says ...")
    add("--error-at", type=int, default=0, help="... at this step")
    add("--error-rank", default="", help="... on these ranks, as in 1,4 (default: on all)")
    add("--error-node", default="", help="... on these nodes alone")
    add("--error-once", action="store_true", help="... not again after a restart")
    add("--orders", action="store_true", help="do what order.RANK and last in the directory say")
    return parser.parse_args()


class Ring:
    """An all-reduce through rank 0."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.peers = _listen(address[1], world) if rank == 0 else [_reach(address, rank)]

    def all_reduce(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        if self.rank:
            self.peers[0].sendall(struct.pack("!d", value))
            return _receive(self.peers[0])
        total = value + sum(_receive(peer) for peer in self.peers)
        for peer in self.peers:
            peer.sendall(struct.pack("!d", total))
        return total


def _listen(port: int, world: int) -> list[socket.socket]:
    peers: dict[int, socket.socket] = {}
    with socket.create_server(("", port), backlog=world) as server:
        server.settimeout(120)
        while len(peers) < world - 1:
            peer, _ = server.accept()
            peers[struct.unpack("!i", peer.recv(4, socket.MSG_WAITALL))[0]] = peer
    return [peers[rank] for rank in sorted(peers)]


def _reach(address: tuple[str, int], rank: int) -> socket.socket:
    deadline = time.monotonic() + 120
    while True:
        try:
            made = socket.create_connection(address, timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
    made.settimeout(None)
    made.sendall(struct.pack("!i", rank))
    return made


def _receive(peer: socket.socket) -> float:
    data = peer.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        time.sleep(1)  # the rank that died is seen first, on a busy machine too
        raise ConnectionError("Connection closed by peer")
    return float(struct.unpack("!d", data)[0])


def among(names: str, name: str) -> bool:
    """True if a list names this one, or none."""
    return not names or name in names.split(",")


def _mark(args: argparse.Namespace, rank: int) -> Path:
    return Path(args.dir) / f"failed.{rank}"


def _seen(args: argparse.Namespace, rank: int) -> bool:
    """Leave a mark of the fault; return whether it was there already."""
    mark = _mark(args, rank)
    there = mark.exists()
    if not there:
        mark.touch()
    return there


def _fail(args: argparse.Namespace, rank: int) -> None:
    """End by a signal's name, "exit:NUMBER", an errno's name or a text; or wait for ever."""
    if not (_seen(args, rank) and args.error_once):
        end_by(args.error, args.dir)


def end_by(error: str, directory: Path) -> None:
    """End as _fail says."""
    if error.startswith("SIG"):  # SIGKILL: as the kernel's OOM killer ends a process
        os.kill(os.getpid(), signal.Signals[error])
    if error.startswith("exit:"):
        os._exit(int(error[5:]))
    if error == "deadlock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    if error == "loader":
        _wait_for_worker()
    if number := getattr(errno, error, 0):
        raise OSError(number, os.strerror(number), str(directory / "data"))
    raise RuntimeError(error)


def ordered(directory: Path, rank: int, node: str, step: int, began: float) -> str:
    """Take the error that is ordered for this rank on this node, from a step on; "": none.

    An order is for the processes that run then; `began`: wall time of the start of this one.
    """
    order = directory / f"order.{rank}"
    try:
        late = order.stat().st_mtime < began
        since, where, error = order.read_text().split(" ", 2)
        if late or step < int(since) or where not in ("-", node):
            return ""
        order.unlink()
    except FileNotFoundError:
        return ""
    return error


def last_step(directory: Path) -> int:
    """Return the last step, as ordered in time for all ranks; 0: no order."""
    try:
        return int((directory / "last").read_text())
    except FileNotFoundError:
        return 0


def _wait_for_worker() -> None:
    """Wait for a batch of a data-loader worker, which waits for a lock that nobody releases."""
    batches, worker = os.pipe()
    if os.fork() == 0:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    os.close(worker)
    os.read(batches, 1)


def main() -> None:
    """Train."""
    args, began = parse(), time.time()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node = os.environ.get("SLURMD_NODENAME", "")
    checkpoint: Path = args.dir / "checkpoint.json"
    step, loss = 0, 1.0
    if checkpoint.exists():
        step, loss = json.loads(checkpoint.read_text())
    if args.stdin and rank == 0:
        for _ in range(step):  # it resumes behind the lines that it has had
            sys.stdin.readline()
    if args.term_save and rank == 0:

        def save_slowly(*_: object) -> None:
            text = json.dumps([step, loss])
            end = time.monotonic() + args.term_save
            with checkpoint.open("w") as file:
                for number, letter in enumerate(text, 1):
                    file.write(letter)
                    file.flush()
                    until = end - args.term_save * (1 - number / len(text))
                    while time.monotonic() < until:  # at work, as a serializer is
                        pass
            sys.exit(0)

        signal.signal(signal.SIGTERM, save_slowly)
    mapped = None
    if args.map:
        with args.map.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    ring = Ring(rank, world)
    with (args.dir / "steps").open("a") as steps:
        while step < args.steps:
            time.sleep(args.step_time)
            if args.data:
                args.data.read_bytes()
            if mapped:
                mapped[len(mapped) - 1]
            if args.orders:
                args.steps = last_step(args.dir) or args.steps
                if error := ordered(args.dir, rank, node, step + 1, began):
                    end_by(error, args.dir)
            own = float((rank + 1) * (step + 1))
            if args.stdin and rank == 0:
                own += float(sys.stdin.readline())  # at its end: ValueError, as in a real script
            here = among(args.error_node, node) and among(args.error_rank, str(rank))
            wrong = here and step + 1 >= args.error_at > 0
            if wrong and args.error == "slow":
                if step + 1 == args.error_at:
                    _mark(args, rank).touch()
                time.sleep(9 * args.step_time)
            elif here and step + 1 == args.error_at and args.error != "nan":
                _fail(args, rank)
            # As in a training with data parallelism: the rank's own loss, of the weights before
            # the step; the sum then spreads a NaN to all weights.
            reported = loss
            if wrong and args.error == "nan" and not (_seen(args, rank) and args.error_once):
                own = reported = float("nan")
            total = ring.all_reduce(own)
            step, loss = step + 1, loss * 0.99 + total * 1e-6
            robust_slurm.beat(step, loss=reported)
            if args.print:
                print(f"rank {rank}: step {step}", flush=True)
            if rank == 0:
                steps.write(f"{time.time():.3f} {step}\n")
                steps.flush()
            if rank == 0 and step % args.save == 0 and math.isfinite(loss):
                fresh = checkpoint.with_suffix(".tmp")
                fresh.write_text(json.dumps([step, loss]))
                fresh.replace(checkpoint)
    if rank == 0:
        (args.dir / "final.json").write_text(json.dumps([step, loss]))
    time.sleep(rank * args.linger)


def reference(steps: int, world: int, stdin: bool = False) -> float:
    """Return the loss of an uninterrupted run (stdin: the lines 1, 2, 3 …)."""
    loss = 1.0
    for step in range(1, steps + 1):
        total = float(step) + (float(step) if stdin else 0.0)
        for rank in range(1, world):
            total += float((rank + 1) * step)
        loss = loss * 0.99 + total * 1e-6
    return loss


if __name__ == "__main__":
    main()
