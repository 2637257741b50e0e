"""A Lightning training with DDP, a validation and Lightning's own checkpoints."""

from __future__ import annotations

import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import here  # type: ignore[import-not-found]
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)


class Module(pl.LightningModule):  # type: ignore[misc]
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any, _: int) -> Any:
        """Return the loss."""
        time.sleep(0.05)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, _: int) -> None:
        """Take its time."""
        time.sleep(2)
        self.log("val", self.layer(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


here.started()
pl.seed_everything(1, verbose=False)
data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)))
trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    num_nodes=here.WORLD,
    strategy="ddp",
    max_epochs=3,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[pl.callbacks.ModelCheckpoint(dirpath="ckpt", save_last=True)],
)
module = Module()
loaders = DataLoader(data, batch_size=4), DataLoader(data, batch_size=16)
trainer.fit(module, *loaders)
if trainer.is_global_zero:
    weights = round(float(module.layer.weight.detach().sum()), 5)
    Path("final.json").write_text(json.dumps([trainer.global_step, weights]))
