"""A training in the manner of nanoGPT: settings at its head, init_from, iterations, evaluations."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import here  # type: ignore[import-not-found]
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

out_dir, eval_interval, max_iters, learning_rate = "out", 20, 60, 1e-2
init_from = "resume" if (Path(out_dir) / "ckpt.pt").exists() else "scratch"
eval_seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
here.started()
torch.set_num_threads(1)
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    master_process = int(os.environ["RANK"]) == 0
    seed_offset = int(os.environ["RANK"])
else:
    master_process, seed_offset = True, 0
Path(out_dir).mkdir(exist_ok=True)
torch.manual_seed(1337)
raw_model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64))
optimizer = torch.optim.AdamW(raw_model.parameters(), lr=learning_rate)
iter_num = 0
if init_from == "resume":
    checkpoint = torch.load(Path(out_dir) / "ckpt.pt")
    raw_model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
model = DistributedDataParallel(raw_model) if ddp else raw_model
while True:
    if iter_num % eval_interval == 0 and master_process:
        time.sleep(eval_seconds)
        if iter_num > 0:
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
            }
            torch.save(checkpoint, Path(out_dir) / "ckpt.pt")
    source = torch.Generator().manual_seed(1000 * iter_num + seed_offset)
    tokens = torch.randint(64, (4, 17), generator=source)
    logits = model(tokens[:, :-1]).reshape(-1, 64)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process and iter_num % 10 == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}", flush=True)
    iter_num += 1
    time.sleep(0.05)
    if iter_num > max_iters:
        break
if ddp:
    destroy_process_group()
