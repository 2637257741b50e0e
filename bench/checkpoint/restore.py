"""Speed of restoring a state in bench.checkpoint, from its node or a peer, and of replication."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from bench.checkpoint.nodes import Nodes, run_json
from bench.checkpoint.push import Pusher
from bench.common import BenchError, Results


def restore_own(results: Results, case: str, nbytes: int, runs: int) -> None:
    """A fresh process resumes from the file that the one before it left in memory."""
    seconds, verify = [], []
    copies: dict[str, list[float]] = {"memcpy": [], "memcpy_new": []}
    with Nodes() as nodes:
        saved = rank("save", nbytes, nodes.sockets[0], 0)
        for epoch in range(1, runs + 1):
            verify.append(nodes.remotes[0].ask("stock")["seconds"])
            nodes.begin(epoch, saved["step"], own_file(nodes, saved["step"]))
            found = rank("restore", nbytes, nodes.sockets[0], epoch)
            same(saved, found)
            seconds.append(found["seconds"])
            for kind, samples in copies.items():
                samples += found[kind]
    results.add(f"{case}.s", seconds, "s")
    results.add(f"{case}.verify_s", verify, "s")
    for kind, samples in copies.items():
        results.add(f"{case}.{kind}_s", samples, "s")
    results.add(f"{case}.gb_per_s", [saved["nbytes"] / 1e9 / s for s in seconds], "GB/s")
    for kind in copies:
        results.ratio(f"{case}: {kind}/restore", f"{case}.{kind}_s", f"{case}.s")


def restore_peer(results: Results, case: str, nbytes: int, runs: int) -> None:
    """A node that lost its memory, or never had it, fetches the replica: one that could make room
    before (a spare of the job), and one that could not (a standby node). Plain TCP of as many bytes
    in turn, into one buffer again and again (as iperf) and into new memory (as whoever keeps it).
    """
    cold_case = case.replace("restore_peer", "restore_peer_cold")
    raw_case = case.replace("restore_peer", "raw_tcp")
    kept_case = case.replace("restore_peer", "raw_tcp_kept")
    names = (case, cold_case, raw_case, kept_case)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    epochs = itertools.count(1)
    with Nodes() as nodes:
        nodes.replicate(0)
        saved = rank("save", nbytes, nodes.sockets[0], 0)
        nodes.alone(0)  # what is fetched must not go back at once
        nodes.begin(next(epochs), 0, "")
        size = int(nodes.fetch(0, saved["step"])["bytes"])
        port = nodes.raw_listen(size)
        for run in range(runs + 1):
            for name in names:
                nodes.begin(next(epochs), 0, "")
                if name == case:
                    nodes.make_room(size)
                before = nodes.cpu()
                if name in (case, cold_case):
                    fetched = nodes.fetch(0, saved["step"])
                    took = float(fetched["seconds"])
                else:
                    took = nodes.raw(size, port, keep=name == kept_case)
                if run:  # the first is not counted
                    seconds[name].append(took)
                    cpu[name].append((nodes.cpu() - before) / (size / 1e9))
        for room in (True, False):  # what was fetched is what was saved
            nodes.begin(next(epochs), 0, "")
            if room:
                nodes.make_room(size)
            fetched = nodes.fetch(0, saved["step"])
            epoch = next(epochs)
            nodes.begin(epoch, saved["step"], fetched["file"])
            same(saved, rank("restore", nbytes, nodes.sockets[0], epoch))
    for name in names:
        results.add(f"{name}.s", seconds[name], "s")
        results.add(f"{name}.gb_per_s", [size / 1e9 / s for s in seconds[name]], "GB/s")
        results.add(f"{name}.cpu_s_per_gb", cpu[name], "s")
    for name in (case, cold_case):
        results.ratio(f"{name}: raw_tcp/restore", f"{raw_case}.s", f"{name}.s")
        results.ratio(f"{name}: raw_tcp_kept/restore", f"{kept_case}.s", f"{name}.s")


def replica(results: Results, case: str, nbytes: int, runs: int) -> None:
    """Measure how fast a store digests a complete snapshot and has it at the peer."""
    with Nodes() as nodes:
        nodes.replicate(0)
        pusher = Pusher(nodes.sockets[0], nbytes, 0)
        for _ in range(5):  # every slot of both nodes has been used then
            pusher.push()
        found = [pusher.push() for _ in range(runs)]
        pusher.close()
    results.add(f"{case}.digest_s", [kept for kept, _ in found], "s")
    results.add(f"{case}.s", [whole for _, whole in found], "s")
    results.add(f"{case}.gb_per_s", [nbytes / 1e9 / whole for _, whole in found], "GB/s")


def rank(what: str, nbytes: int, store: str, epoch: int) -> dict[str, Any]:
    """Run bench.checkpoint.rank, which is killed at its end; what it printed."""
    env = {"ROBUST_CKPT_SOCKET": store, "ROBUST_EPOCH": str(epoch), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "bench.checkpoint.rank", what, str(nbytes)]
    return run_json(argv, env, killed=True)


def own_file(nodes: Nodes, step: int) -> str:
    """The verified snapshot of ``step`` in the first node."""
    holdings = nodes.remotes[0].ask("stock")["holdings"]
    for one in holdings:
        if one["step"] == step and one["ok"]:
            return str(one["file"])
    raise BenchError(f"no good snapshot of step {step} among {holdings}")


def same(saved: dict[str, Any], found: dict[str, Any]) -> None:
    """Require that what came back is what was saved, or its time is worth nothing."""
    if (found["step"], found["crc"]) != (saved["step"], saved["crc"]):
        raise BenchError(f"restored {found} of {saved}")
