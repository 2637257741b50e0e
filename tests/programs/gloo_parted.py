"""Gloo ranks of one launcher, as many as the second word says; rank 1 differs in collective 4.

The first word says how. ``skip``: it does not enter it. ``size``: it gives fewer elements.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

mode, world, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])


def rank(number: int) -> None:
    import torch
    import torch.distributed as dist

    import robust_slurm

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", world_size=world, rank=number
    )
    total = torch.ones(8)
    for step in range(3):
        dist.all_reduce(total)
        robust_slurm.beat(step)
    (directory / f"ready-{number}").touch()
    if number == 1 and mode == "skip":
        time.sleep(600)
    dist.all_reduce(torch.ones(4 if number == 1 else 8))
    dist.all_reduce(total)


def launcher() -> None:
    ranks = []
    for number in range(world):
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(world)}
        environ = os.environ | place | {"TORCHELASTIC_RUN_ID": "none"}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv, "rank"], env=environ))
    for each in ranks:
        each.wait()


rank(int(os.environ["RANK"])) if sys.argv[4:] == ["rank"] else launcher()
