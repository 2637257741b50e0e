"""One rank of a gloo world that resumes, saves steps 1 to 3 and is killed.

Arguments: rank, world, file for the rendezvous. The store is the environment's.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from robust_slurm import Checkpointer

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", f"file://{sys.argv[3]}", rank=RANK, world_size=WORLD)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = Checkpointer(model=model, optimizer=optimizer)
print(checkpointer.resume(), flush=True)
for step in range(1, 4):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    checkpointer.save(step)
# save() returns before the copy is made: a rank killed here at once may leave no step 3.
assert checkpointer._session is not None and checkpointer._session.saver is not None
checkpointer._session.saver.settle()
dist.barrier()
os.kill(os.getpid(), signal.SIGKILL)
