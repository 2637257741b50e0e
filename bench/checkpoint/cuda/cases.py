"""The Checkpointer on a GPU, in at most eight minutes: ``python -m bench.checkpoint --cuda``.

Trainings of seven kinds that are killed and resumed, bit for bit, all at once on one GPU. Then the
time of the host in save() and in the optimizer's hook, whether they wait for a busy GPU with a
GradScaler, the temporary memory of a tensor that is not contiguous, and whole steps with and
without saving beside a copy of as many bytes to pinned memory. After each case its numbers are
printed and the JSON is written. What one machine cannot show is listed at the end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from bench.checkpoint.nodes import SHM, run_json
from bench.checkpoint.work import LAYERS, MB, SIZES
from bench.common import MIN_SAMPLES, BenchError, Results, finish, in_time, summarise
from robust_slurm.checkpoint.store.events import AlarmEvent, Restore, StoreEvent
from robust_slurm.checkpoint.store.store import Store

BUDGET = 8 * 60.0  # s for all
LEAST = 20.0  # s that must be left for a case to begin
SMALL = 64 << 20  # bytes of the state in cases that measure no time
LARGE = 1 << 30  # bytes of the tensor that is not contiguous
CUDA_SIZES = {name: SIZES[name] for name in ("256MB", "1GB")} | {"8GB": 8192 * MB}
MANY = 250
"""Layers of a state of 12,000 tensors."""
FEW = 5
"""Samples of what takes a second or more, and of what hardly varies."""
RESUMED = ("plain", "amp", "graph", "unpinned", "two_dtypes", "strided", "mid_copy")
NO_GPU = 2
"""Exit code where there is no GPU."""
WENT_WRONG = (BenchError, OSError, ValueError, subprocess.SubprocessError)


def run(results: Results, args: argparse.Namespace, device: str = "cuda") -> int:
    """Run all cases on ``device``; the exit code: 0, 1 when something went wrong, 2 for no GPU."""
    why = no_gpu() if device == "cuda" else ""
    if why:
        print(f"bench.checkpoint --cuda: {why}; nothing was measured", file=sys.stderr)
        return NO_GPU
    sizes = args.size or (list(CUDA_SIZES)[:1] if results.quick else list(CUDA_SIZES))
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    for what, reason in unseen(device, *there(device)).items():
        results.settings[f"not measured: {what}"] = reason
    each = cases(results, device, sizes, runs)
    failed = in_time(results, each, (BUDGET, LEAST), WENT_WRONG, args.json)
    code = finish(results, args)
    for key, text in results.settings.items():
        if key.startswith(("failed: ", "not measured: ")):
            print(f"{key}: {text}")
    return code or (1 if failed else 0)


def cases(
    results: Results, device: str, sizes: Sequence[str], runs: int
) -> Mapping[str, Callable[[float], None]]:
    """Name → what measures it within so many seconds, the most important first."""

    def speed_of(size: str) -> Callable[[float], None]:
        return lambda left: speed(results, device, size, runs, left)

    return {
        "resumed": lambda left: resumed(results, device, left),
        "scaler": lambda left: scaler(results, device, min(runs, FEW), left),
        "temporary": lambda left: temporary(results, device, left),
        "host": lambda left: host(results, device, LAYERS, runs, left),
        "host_many": lambda left: host(results, device, MANY, runs, left),
        **{f"speed_{size}": speed_of(size) for size in sizes},
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


def note(results: Results, metric: str, samples: Sequence[float], unit: str) -> None:
    """Record a metric with the number of its samples, which may be few."""
    results.metrics[metric] = summarise(samples, unit)


def resumed(results: Results, device: str, left: float) -> None:
    """Kill and resume a training of each kind, all at once; BenchError names those that differ."""
    wrong = []

    def one(kind: str) -> dict[str, Any] | str:
        try:
            return kill_and_resume(kind, device, left)
        except WENT_WRONG as error:
            return str(error)

    with ThreadPoolExecutor(len(RESUMED)) as pool:
        for kind, found in zip(RESUMED, pool.map(one, RESUMED), strict=True):
            if isinstance(found, str):
                wrong.append(found)
                continue
            results.count(f"cuda_{kind}.identical", 1)
            if found["alarms"]:
                results.settings[f"said in {kind}"] = "; ".join(sorted(set(found["alarms"])))
    if wrong:
        raise BenchError("; ".join(wrong))


def kill_and_resume(kind: str, device: str, left: float = BUDGET) -> dict[str, Any]:
    """A training that is killed, and the one after it; BenchError unless their states are equal."""
    with Rank() as rank:
        before = rank.run(kind, device, SMALL, 0, left)
        rank.resumes()
        after = rank.run(f"after-{kind}", device, SMALL, 0, left)
    for key in ("step", "crc", "extra"):
        if before[key] != after[key]:
            raise BenchError(f"{kind}: {key} was {before[key]}, resumed as {after[key]}")
    if kind == "unpinned" and device == "cuda" and not rank.alarms:
        raise BenchError("unpinned: no alarm was raised")
    return {**after, "alarms": rank.alarms}


def scaler(results: Results, device: str, runs: int, left: float) -> None:
    """Measure whether save() and the hook wait for a busy GPU, with a GradScaler in ``extra``."""
    with Rank() as rank:
        found = rank.run("scaler", device, SMALL, runs, left)
    for key in ("save", "hook", "busy"):
        note(results, f"cuda_scaler.{key}_s", found[key], "s")
    busy = found["busy"][0]
    waits = [key for key in ("save", "hook") if median(found[key]) > busy / 2]
    results.settings["waits with a GradScaler"] = ", ".join(waits) or "none"


def temporary(results: Results, device: str, left: float) -> None:
    """Measure the memory that a save of a tensor that is not contiguous takes for its time."""
    with Rank() as rank:
        found = rank.run("temporary", device, LARGE, 0, left)
    mib = [peak / MB for peak in found["peaks"]]
    note(results, "cuda_temporary.inside_save_mib", mib[:3], "MiB")
    note(results, "cuda_temporary.beside_mib", mib[3:], "MiB")
    results.settings["temporary"] = f"for {LARGE / MB:.0f} MiB in one tensor, not contiguous"


def host(results: Results, device: str, layers: int, runs: int, left: float) -> None:
    """Measure the host's time in save() and in the hook, by the number of tensors."""
    with Rank() as rank:
        found = rank.run("host", device, SMALL, runs, left, layers)
    note_host(results, f"cuda_host_{found['tensors']}", found)


def note_host(results: Results, case: str, found: Mapping[str, Any]) -> None:
    both = [save + hook for save, hook in zip(found["save"], found["hook"], strict=True)]
    note(results, f"{case}.save_s", found["save"], "s")
    note(results, f"{case}.hook_s", found["hook"], "s")
    note(results, f"{case}.blocked_s", both, "s")


def speed(results: Results, device: str, size: str, runs: int, left: float) -> None:
    """Measure the cost of saving a state of this size."""
    few = min(runs, FEW) if CUDA_SIZES[size] > SIZES["1GB"] else runs
    with Rank() as rank:
        found = rank.run("speed", device, CUDA_SIZES[size], few, left)
    if rank.alarms:
        raise BenchError("; ".join(rank.alarms))
    case = f"cuda_{size}"
    for key in ("counted", "copy", "with", "without", "memcpy"):
        note(results, f"{case}.{key}_s", found[key], "s")
    note(results, f"{case}.step_ratio", found["paired"], "ratio")
    note_host(results, case, found["host"])
    results.ratio(f"{case}.blocked/memcpy", f"{case}.blocked_s", f"{case}.memcpy_s")
    results.settings[f"state_{size}"] = (
        f"{found['nbytes']} bytes in {found['host']['tensors']} tensors; a step has "
        f"{found['products']} products of matrices of 4096 x 4096 besides"
    )
    results.settings["gpu"] = found["device"]


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

    def _emit(self, event: StoreEvent) -> None:
        if isinstance(event, AlarmEvent):
            self.alarms.append(event.text)

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

    def run(
        self, case: str, device: str, nbytes: int, runs: int, limit: float, layers: int = 0
    ) -> dict[str, Any]:
        """Run one process of ``bench.checkpoint.cuda.rank``; what it printed last. ``layers``: 0
        for LAYERS."""
        argv = [sys.executable, "-m", "bench.checkpoint.cuda.rank", case, device, str(nbytes)]
        env = {
            "ROBUST_CKPT_SOCKET": str(self._store.socket_path),
            "ROBUST_EPOCH": str(self._epoch),
            "ROBUST_RUN_ID": "bench",
        }
        return run_json(
            [*argv, str(runs), str(layers or LAYERS)], env, killed=case in RESUMED, limit=limit
        )
