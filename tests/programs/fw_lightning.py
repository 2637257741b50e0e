"""Lightning: dropout, AdamW, schedules by step and by a validation, accumulation, odd batches."""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import logging
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from ckpt_training import WIDTH, Samples, options, seed
from framework_training import Steps, whole
from teardown import leave
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

args = options("loader", "limit", "early", "device")
env = os.environ
if "SLURM_NTASKS" not in env and "RANK" in env:
    env.setdefault("TORCHELASTIC_RUN_ID", "here")  # so that Lightning reads RANK and its kin
rank, world = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
nodes = int(env.get("SLURM_NNODES", "1"))
torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
seed(1)
steps = Steps(args, rank)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.ids: list[Tensor] = []
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, inputs, targets = batch
        self.ids.append(ids)
        self.batches += 1
        return (self.network(inputs) - targets).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        self.log("val", (self.network(inputs) - targets).square().mean() + torch.rand(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step
        if step == self.done:
            return
        self.done = step
        steps.amid(step)
        ids, self.ids = whole(self.ids), []
        steps.done(step, outputs["loss"].item(), ids, self, self.trainer.optimizers[0])

    def on_train_start(self) -> None:
        torch.rand(7)  # what draws at a start must not show
        self.done = self.trainer.global_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]

    def loader(self, shuffle: bool) -> Any:
        if args.loader == "stateful" and shuffle:
            return StatefulDataLoader(Samples(), batch_size=2, shuffle=True)
        workers = 1 if args.loader == "workers" and shuffle else 0
        return DataLoader(Samples(), batch_size=2, shuffle=shuffle, num_workers=workers)

    def train_dataloader(self) -> Any:
        return self.loader(True)

    def val_dataloader(self) -> Any:
        return self.loader(False)


class Stop(pl.Callback):
    """Ends the training at the end of an epoch, as EarlyStopping does, and counts."""

    epochs = 0

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1
        if args.early and self.epochs == int(args.early):
            trainer.should_stop = True

    def state_dict(self) -> dict[str, int]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epochs = state["epochs"]


def main() -> None:
    callbacks: list[pl.Callback] = [Stop()]
    if not args.bare:
        from robust_slurm.integrations.lightning import RobustCallback

        callbacks.append(RobustCallback(directory=args.directory, every=args.every))
    by_epochs = args.limit == "epochs"  # else by steps
    trainer = pl.Trainer(
        accelerator=args.device or "cpu", devices=world // nodes, num_nodes=nodes,
        strategy="ddp" if world > 1 else "auto", callbacks=callbacks,
        max_epochs=args.steps // 3 if by_epochs else -1, max_steps=-1 if by_epochs else args.steps,
        accumulate_grad_batches=5 if world == 1 else 2,  # 12 batches (6): steps of 5, 5, 2 (2)
        val_check_interval=5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=args.dir,
    )  # fmt: skip
    module = Module()
    trainer.fit(module)
    steps.end(batches=int(module.batches), epochs=trainer.current_epoch)


main()
leave()
