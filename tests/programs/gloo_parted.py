"""Four gloo ranks of one launcher; in the last collective rank 1 is elsewhere, by the first word.

``skip``: it does not enter it; ``size``: it gives 4 elements where the others give 8; ``op``: it
broadcasts; ``held``: it holds the interpreter's lock for ever.
"""

from __future__ import annotations

import collections
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

mode, directory = sys.argv[1], Path(sys.argv[2])


def rank(number: int) -> None:
    import torch
    import torch.distributed as dist

    import robust_slurm

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", world_size=4, rank=number
    )
    total = torch.ones(8)
    for step in range(3):
        dist.all_reduce(total)
        robust_slurm.beat(step)
    (directory / f"ready-{number}").touch()
    if number == 1:
        if mode == "skip":
            time.sleep(600)
        if mode == "held":
            collections.deque(itertools.repeat(0), maxlen=0)
        if mode == "op":
            dist.broadcast(total, 1)
    dist.all_reduce(torch.ones(4 if number == 1 else 8))
    dist.all_reduce(total)


def launcher() -> None:
    ranks = []
    for number in range(4):
        place = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "4"}
        environ = os.environ | place | {"TORCHELASTIC_RUN_ID": "none"}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv, "rank"], env=environ))
    for each in ranks:
        each.wait()


rank(int(os.environ["RANK"])) if sys.argv[3:] == ["rank"] else launcher()
