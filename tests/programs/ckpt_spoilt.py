"""A Checkpointer's training that fails on one node in step 12, in a replay in step 2.

It waits there for the others, and they for it, as in a collective; the job's first two epochs have
that node.

Says for each process where it resumed: ``resumed RANK STEP REPLAY``.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import argparse
import os
import time
from pathlib import Path

from teardown import leave

import robust_slurm

parser = argparse.ArgumentParser()
parser.add_argument("--bad", default="")
parser.add_argument("--dir", type=Path, required=True)
args = parser.parse_args()
replay = os.environ.get("ROBUST_REPLAY", "0")
steps = int(os.environ.get("ROBUST_REPLAY_STEPS", "30"))
bad = os.environ["SLURMD_NODENAME"] == args.bad
checkpointer = robust_slurm.Checkpointer(extra={"sum": 0.0})
step = checkpointer.resume()
os.write(1, f"resumed {os.environ['RANK']} {step} {replay}\n".encode())
while step < steps:
    step += 1
    time.sleep(0.1)
    if step == 12 and robust_slurm.epoch() <= 2:
        here = f"here.{robust_slurm.epoch()}"
        (args.dir / f"{here}.{os.environ['RANK']}").touch()
        patience = time.monotonic() + 60
        while time.monotonic() < patience:
            if bad and len(list(args.dir.glob(f"{here}.*"))) == int(os.environ["WORLD_SIZE"]):
                break
            time.sleep(0.05)
    if bad and step == (2 if replay == "1" else 12):
        raise RuntimeError("wrong result")
    checkpointer.extra["sum"] += step
    checkpointer.save(step)
checkpointer.close()
os.write(1, f"sum {checkpointer.extra['sum']}\n".encode())
leave()
