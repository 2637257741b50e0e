"""The Checkpointer on a GPU, in at most half an hour: ``python -m bench.checkpoint --cuda``.

Speed: the time that save() and the optimizer's hook stand still, and whole steps with and without
saving, beside a copy of as many bytes to pinned memory. Then trainings that are killed and resumed,
bit for bit: plain, AMP with a GradScaler, a CUDA graph, memory that cannot be registered, two
processes on one GPU. What one machine cannot show is listed at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.checkpoint.nodes import SHM, run_json
from bench.checkpoint.work import SIZES
from bench.common import MIN_SAMPLES, BenchError, Results, finish
from robust_slurm.checkpoint.store.events import Event, Restore
from robust_slurm.checkpoint.store.store import Store

BUDGET = 30 * 60.0  # s for all
LEAST = 60.0  # s that must be left for a case to begin
SMALL = 64 << 20  # bytes of the state in cases that measure no time
RESUMED = ("plain", "amp", "graph", "unpinned")
NO_GPU = 2
"""Exit code where there is no GPU."""


def run(results: Results, args: argparse.Namespace, device: str = "cuda") -> int:
    """Run all cases on ``device``; the exit code: 0, 1 when something went wrong, 2 for no GPU."""
    why = no_gpu() if device == "cuda" else ""
    if why:
        print(f"bench.checkpoint --cuda: {why}; nothing was measured", file=sys.stderr)
        return NO_GPU
    sizes = args.size or (list(SIZES)[:1] if results.quick else list(SIZES))
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    end = time.monotonic() + BUDGET
    failed = []
    for name, call in cases(results, device, sizes, runs).items():
        left = end - time.monotonic()
        if left < LEAST:
            results.settings[f"not measured: {name}"] = "the half hour was over"
            continue
        print(f"{time.strftime('%H:%M:%S')} {name}", file=sys.stderr, flush=True)
        try:
            call()
        except (BenchError, OSError, ValueError) as error:
            failed.append(name)
            results.settings[f"failed: {name}"] = str(error)
    for what, reason in unseen(device, *there(device)).items():
        results.settings[f"not measured: {what}"] = reason
    code = finish(results, args)
    for key, text in results.settings.items():
        if key.startswith(("failed: ", "not measured: ")):
            print(f"{key}: {text}")
    return code or (1 if failed else 0)


def cases(
    results: Results, device: str, sizes: list[str], runs: int
) -> Mapping[str, Callable[[], None]]:
    """Name → what measures it, the most important first."""

    def speed_of(size: str) -> Callable[[], None]:
        return lambda: speed(results, device, size, runs)

    def resumed(case: str) -> Callable[[], None]:
        return lambda: add(results, case, [kill_and_resume(case, device)])

    return {
        **{f"resumed_{case}": resumed(case) for case in RESUMED},
        **{f"speed_{size}": speed_of(size) for size in sizes},
        "resumed_two_processes": lambda: two_processes(results, device),
    }


def no_gpu() -> str:
    """Why there is no GPU to measure on; "" if there is one."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or "none: it was built without"
        return f"torch {torch.__version__} sees no GPU (CUDA {built})"
    return ""


def there(device: str) -> tuple[int, int]:
    """The GPUs that torch sees, and the NUMA nodes of the machine."""
    import torch

    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return (torch.cuda.device_count() if device == "cuda" else 0), nodes


def unseen(device: str, gpus: int, nodes: int) -> dict[str, str]:
    """Name → why a run on such a machine does not show it. Pure."""
    found = {
        "replicas, InfiniBand": "one node takes part",
        "FSDP2, NCCL": "one rank takes part",
        "a day of training": "each case takes seconds",
    }
    if device != "cuda":
        found["anything of a GPU"] = f"the device is {device}"
    if gpus < 2:
        found["one process for each GPU, NVLink, a context on GPU 0"] = "there is no second GPU"
    if nodes < 2:
        found["slots on the GPU's NUMA node"] = "the machine has one NUMA node"
    return found


def speed(results: Results, device: str, size: str, runs: int) -> None:
    """Measure the cost of saving a state of this size."""
    with Rank() as rank:
        found = rank.run("speed", device, SIZES[size], runs)
    if rank.alarms:
        raise BenchError("; ".join(rank.alarms))
    case = f"cuda_{size}"
    for key in ("blocked", "with", "without", "memcpy"):
        results.add(f"{case}.{key}_s", found[key], "s")
    results.add(f"{case}.step_ratio", found["paired"], "ratio")
    results.ratio(f"{case}.blocked/memcpy", f"{case}.blocked_s", f"{case}.memcpy_s")
    results.settings[f"state_{size}"] = f"{found['nbytes']} bytes in {found['tensors']} tensors"
    results.settings["gpu"] = found["device"]


def kill_and_resume(case: str, device: str) -> dict[str, Any]:
    """A training that is killed, and the one after it; BenchError unless their states are equal."""
    with Rank() as rank:
        before = rank.run(case, device, SMALL, 0)
        rank.resumes()
        after = rank.run(f"after-{case}", device, SMALL, 0)
    for key in ("step", "crc", "extra"):
        if before[key] != after[key]:
            raise BenchError(f"{case}: {key} was {before[key]}, resumed as {after[key]}")
    if case == "unpinned" and device == "cuda" and not rank.alarms:
        raise BenchError("unpinned: no alarm was raised")
    return {**after, "alarms": rank.alarms}


def two_processes(results: Results, device: str) -> None:
    """Two trainings on one GPU at a time, each with a store of its own."""
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: kill_and_resume("plain", device), range(2)))
    add(results, "two_processes", found)


def add(results: Results, case: str, found: list[dict[str, Any]]) -> None:
    """Note that it resumed bit for bit, and what was said meanwhile."""
    results.count(f"cuda_{case}.identical", len(found))
    if said := {alarm for one in found for alarm in one["alarms"]}:
        results.settings[f"said in {case}"] = "; ".join(sorted(said))


class Rank:
    """One rank, and the Store that it has under robust-srun: ``with Rank() as rank``."""

    def __init__(self) -> None:
        self.alarms: list[str] = []
        self._epoch = 0

    def __enter__(self) -> Rank:
        self._directory = tempfile.TemporaryDirectory(prefix="bench-cuda-", dir=SHM)
        path = Path(self._directory.name)
        self._store = Store(path / "s", name="cuda", key=b"bench-cuda" * 4, emit=self._emit)
        self._begin(None)
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()
        self._directory.cleanup()

    def _emit(self, event: Event) -> None:
        if type(event).__name__ == "Alarm":
            self.alarms.append(str(getattr(event, "text", event)))

    def _begin(self, restore: Restore | None) -> None:
        self._store.begin(self._epoch, restore)
        self._store.place({0: None})  # no peer

    def resumes(self) -> None:
        """The next process goes on from the newest complete snapshot."""
        good = [one for one in self._store.stock() if one.ok]
        if not good:
            raise BenchError("no snapshot is complete")
        newest = max(good, key=lambda one: one.step)
        self._epoch += 1
        self._begin(Restore(newest.step, "memory", {0: newest.file}))

    def run(self, case: str, device: str, nbytes: int, runs: int) -> dict[str, Any]:
        """Run one process of ``bench.checkpoint.cuda.rank``; what it printed last."""
        argv = [sys.executable, "-m", "bench.checkpoint.cuda.rank", case, device, str(nbytes)]
        env = {
            "ROBUST_CKPT_SOCKET": str(self._store.socket_path),
            "ROBUST_EPOCH": str(self._epoch),
            "ROBUST_RUN_ID": "bench",
        }
        return run_json([*argv, str(runs)], env, killed=case in RESUMED)
