"""The cost of a heartbeat: ``python -m bench.heartbeat``.

Case ``beat``: nanoseconds per call in the training process, beside a bare ``struct.pack_into`` of
the same fields, and per reading in the shim. Case ``start``: what the library and the hook add to
the start of an interpreter. Case ``supervisor``: what robust-srun itself costs, with 1,250 nodes of
8 ranks that report once a second.
"""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import robust_slurm
from bench.common import Results, main, ns_per_call
from bench.heartbeat.supervisor import supervisor
from robust_slurm import heartbeat, layout
from robust_slurm.auto import HOOK_DIR
from robust_slurm.record import BeatReader, record_path

SHM = "/dev/shm"


def beat(results: Results) -> None:
    """ns per beat, phase and reading."""
    outside = _copy_outside()
    with tempfile.TemporaryDirectory(prefix="bench-heartbeat-", dir=SHM) as directory:
        os.environ["ROBUST_BEAT_DIR"] = directory
        if not robust_slurm.attach(local_rank=0):
            raise RuntimeError(f"no record could be claimed in {directory}: is {SHM} writable?")
        reader = BeatReader(record_path(directory, robust_slurm.epoch(), 0))
        names = {
            "beat": robust_slurm.beat,
            "phase": robust_slurm.phase,
            "auto": heartbeat._auto_step,
            "outside": outside.beat,
            "pack": layout.BEAT.pack_into,
            "buffer": bytearray(layout.SIZE),
            "read": reader.read,
        }
        statements = {
            "beat_auto": "auto()",  # first: an explicit beat switches it off
            "bare_pack": "pack(buffer, 64, 7, 12345, 1.5, 2.5, 0.5, 1, 7)",
            "beat_explicit": "beat(12345)",
            "beat_full": "beat(12345, loss=2.5, grad_norm=0.5)",
            "beat_outside": "outside(12345, loss=2.5, grad_norm=0.5)",
            "phase": "with phase('eval'): pass",
            "read_unchanged": "read()",
            "beat_and_read": "beat(1); read()",
        }
        calls, samples = (2_000, 20) if results.quick else (100_000, 30)
        auto = {"beat_auto": statements.pop("beat_auto")}
        found = ns_per_call(auto, names, calls=calls, samples=samples)
        found |= ns_per_call(statements, names, calls=calls, samples=samples)
    for case, values in found.items():
        results.add(f"{case}.call_ns", values, "ns")
    for case in ("beat_explicit", "beat_full", "beat_outside"):
        results.ratio(f"{case}/bare_pack", f"{case}.call_ns", "bare_pack.call_ns")


def start(results: Results) -> None:
    """Milliseconds for an interpreter to start and end: bare, with the import, with the hook."""
    root = str(Path(HOOK_DIR).parent.parent)
    bare = {"PATH": os.defpath}
    with tempfile.TemporaryDirectory(prefix="bench-heartbeat-") as empty:
        variants = {
            "bare": ("pass", {**bare, "PYTHONPATH": empty}),
            "import": ("import robust_slurm", {**bare, "PYTHONPATH": root}),
            "hook": ("pass", {**bare, "PYTHONPATH": HOOK_DIR, "ROBUST_BEAT_DIR": empty}),
        }
        found: dict[str, list[float]] = {name: [] for name in variants}
        # Not the virtual environment: what its site-packages load at start would drown this.
        python = os.path.realpath(sys.executable)
        for _ in range(20 if results.quick else 100):
            for name, (code, env) in variants.items():
                found[name].append(_lifetime_ms([python, "-c", code], env))
    for name, values in found.items():
        results.add(f"start.{name}_ms", values, "ms")
    for name in ("import", "hook"):
        extra = [a - b for a, b in zip(found[name], found["bare"], strict=True)]
        results.add(f"start.{name}_extra_ms", extra, "ms")


def _lifetime_ms(command: list[str], env: dict[str, str]) -> float:
    """Milliseconds from the start to the end of ``command``. RuntimeError if it fails."""
    begun = time.perf_counter()
    child = subprocess.Popen(command, env=env)
    # subprocess's own wait with a time-out sleeps in growing steps, coarser than what we measure.
    ended, _, _ = select.select([pidfd := os.pidfd_open(child.pid)], [], [], 60)
    spent = (time.perf_counter() - begun) * 1e3
    os.close(pidfd)
    if not ended:
        child.kill()
    if child.wait(timeout=10) != 0:
        raise RuntimeError(f"{command} failed with {child.returncode}: run it by hand to see why")
    return spent


def _copy_outside() -> ModuleType:
    """A second copy of the library's module, loaded as it is outside robust-srun."""
    os.environ.pop("ROBUST_BEAT_DIR", None)
    spec = importlib.util.spec_from_file_location("robust_slurm.outside", heartbeat.__file__)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{heartbeat.__file__} cannot be loaded a second time")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = {"beat": beat, "start": start, "supervisor": supervisor}

if __name__ == "__main__":
    raise SystemExit(main("heartbeat", CASES))
