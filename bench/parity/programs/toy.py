"""A training of short steps that waits, writes and ends in the ways that users' programs do.

Nothing in it knows of robust-srun, but `--beat`. Rank 0 writes `final.json`: steps and loss.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import here  # type: ignore[import-not-found]
import waits  # type: ignore[import-not-found]


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--steps", type=int, default=50)
    add("--step-time", type=float, default=0.06)
    add("--wait", action="append", default=[], help="KIND:STEP:SECONDS[:RANK]; step 0: before all")
    add("--beat", action="store_true", help="report each step to robust_slurm")
    add("--print", action="store_true", help="print every step")
    add("--vary", type=float, default=1.0, help="every tenth step takes so many times as long")
    add("--after", type=float, default=0.0, help="rank r ends r times so many seconds later")
    add("--code", default="", help="RANK:CODE: that rank exits with CODE at its end")
    add("--fail", default="", help="RANK:STEP:CODE: that rank exits with CODE at that step")
    add("--alone", action="store_true", help="no all-reduce: the ranks know nothing of each other")
    add("--words", nargs="*", default=[], help="printed by rank 0")
    return parser.parse_args()


def main() -> int:
    """Train; return the exit code."""
    args = parse()
    here.started()
    if args.beat:
        import robust_slurm
    planned = [waits.parse(text) for text in args.wait]
    for wait in planned:
        if wait.step == 0:
            wait.make()
    ring = None if args.alone else here.Together()
    loss = 1.0
    for step in range(1, args.steps + 1):
        time.sleep(args.step_time * (args.vary if step % 10 == 0 else 1.0))
        for wait in planned:
            if wait.step == step:
                wait.make()
        if args.fail and args.fail.startswith(f"{here.RANK}:{step}:"):
            print(f"rank {here.RANK} fails at step {step}", file=sys.stderr, flush=True)
            return int(args.fail.split(":")[2])
        own = float((here.RANK + 1) * step)
        loss = loss * 0.99 + (ring.all_reduce(own) if ring else own) * 1e-6
        if args.beat:
            robust_slurm.beat(step, loss=loss)
        if args.print:
            print(f"rank {here.RANK}: step {step}", flush=True)
    if ring:
        ring.close()
    if here.RANK == 0:
        Path("final.json").write_text(json.dumps([args.steps, loss]))
        for word in args.words:
            sys.stdout.buffer.write(os.fsencode(word) + b"\n")
    print(f"rank {here.RANK} of {here.WORLD} is done", flush=True)
    time.sleep(here.RANK * args.after)
    rank, _, code = args.code.partition(":")
    return int(code) if rank == str(here.RANK) else 0


if __name__ == "__main__":
    sys.exit(main())
