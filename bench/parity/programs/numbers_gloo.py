"""A program of several processes on numpy and gloo, without a model of torch."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import here  # type: ignore[import-not-found]
import numpy as np
import torch
import torch.distributed as dist

here.started()
address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
dist.init_process_group("gloo", init_method=address, rank=here.RANK, world_size=here.WORLD)
values = np.zeros(100)
for step in range(60):
    time.sleep(0.05)
    part = torch.from_numpy(np.full(100, float(here.RANK + step)))
    dist.all_reduce(part)
    values += part.numpy()
    if step == 30 and here.RANK == 0:
        time.sleep(float(sys.argv[1]))
    dist.barrier()
Path(f"sum.{here.RANK}").write_text(json.dumps(values.sum()))
dist.destroy_process_group()
