"""A training that saves its state by itself and reports nothing: with ``--torch`` by an optimizer
whose steps torch's hook counts, else steps are not seen at all. It dies once, in its first start.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save", type=int, default=10, help="steps between two checkpoints")
parser.add_argument("--die", type=int, default=25, help="kill itself after this step")
parser.add_argument("--pause", type=float, default=0.1)
parser.add_argument("--scratch", action="store_true", help="never resume")
parser.add_argument("--torch", action="store_true")
args = parser.parse_args()

optimizer = None
if args.torch:
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight])
rank = int(os.environ["RANK"])
saved = sorted((args.dir / "ckpts").glob("state_*.json"))
state = json.loads(saved[-1].read_text()) if saved and not args.scratch else {"step": 0}
if optimizer is not None and state["step"]:
    optimizer.load_state_dict(torch.load(args.dir / "ckpts" / "optimizer.pt"))
for step in range(state["step"] + 1, args.steps + 1):
    if optimizer is not None:
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        optimizer.step()
    time.sleep(args.pause)
    if rank == 0:
        print(f"iter {step}: well", flush=True)
        if step % args.save == 0:
            (args.dir / "ckpts").mkdir(exist_ok=True)
            if optimizer is not None:
                torch.save(optimizer.state_dict(), args.dir / "ckpts" / "optimizer.pt")
            name = f"state_{step:04}.json"
            (args.dir / "ckpts" / name).write_text(json.dumps({"step": step}))
    if step == args.die and rank == 0 and os.environ.get("ROBUST_EPOCH") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
sys.stdout.flush()
os._exit(0)  # the interpreter's end costs half a second with torch
