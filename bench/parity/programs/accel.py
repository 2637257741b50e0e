"""A training with Hugging Face's Accelerate, started by `accelerate launch` or by srun."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import here  # type: ignore[import-not-found]
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

here.started()
os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_NTASKS"])
os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])
torch.set_num_threads(1)
torch.manual_seed(1)
accelerator = Accelerator(cpu=True)
data = TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(1)))
layer = torch.nn.Linear(8, 1)
layer, optimizer, loader = accelerator.prepare(
    layer, torch.optim.SGD(layer.parameters(), lr=0.05), DataLoader(data, batch_size=4)
)
for (batch,) in loader:
    time.sleep(0.1)
    loss = layer(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    time.sleep(15)  # an upload
    weights = round(float(accelerator.unwrap_model(layer).weight.detach().sum()), 5)
    Path("final.json").write_text(json.dumps(weights))
accelerator.wait_for_everyone()
accelerator.end_training()
