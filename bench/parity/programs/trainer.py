"""A training with Hugging Face's Trainer, which saves and evaluates as it does by itself."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import here  # type: ignore[import-not-found]

os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_NTASKS"])
os.environ.setdefault("LOCAL_RANK", os.environ["SLURM_LOCALID"])

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

torch.set_num_threads(1)
here.started()


class Numbers(Dataset[dict[str, Any]]):
    """Random numbers."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.01)
        source = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=source), "labels": torch.zeros(1)}


class Model(torch.nn.Module):
    """A layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        """Return the loss."""
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


trainer = Trainer(
    model=Model(),
    args=TrainingArguments(
        output_dir="hf",
        max_steps=30,
        per_device_train_batch_size=4,
        save_steps=10,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=Numbers(),
)
resume = bool(list(Path("hf").glob("checkpoint-*")))
trainer.train(resume_from_checkpoint=resume or None)
if here.RANK == 0:
    Path("final.json").write_text(json.dumps(trainer.state.global_step))
