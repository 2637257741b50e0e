"""Hugging Face's Trainer: dropout, AdamW, a schedule, accumulation, evaluation, uneven epochs."""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import os
import warnings
from typing import Any

# First: it needs torch's compiler, which ckpt_training leaves out.
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

import torch  # isort: skip
from ckpt_training import WIDTH, Samples, options, seed
from framework_training import Steps, whole
from teardown import leave
from torch import Tensor, nn
from torch.utils.data import Dataset

args = options("stop", "grouped", "device")
rank = int(os.environ.get("RANK", "0"))
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
seed(1)
steps = Steps(args, rank)
ids: list[Tensor] = []
losses: list[Tensor] = []
BACKEND = {"": "gloo", "cuda": "nccl"}


class Data(Dataset[dict[str, Any]]):
    """``Samples`` as transformers wants them, 22 of them: epochs end within an accumulation."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, i: int) -> dict[str, Any]:
        number, inputs, targets = Samples()[i]
        return {"number": torch.tensor(number), "inputs": inputs, "targets": targets}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )

    def forward(self, number: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = (self.network(inputs) - targets).square().mean()
        if self.training:
            ids.append(number)
            losses.append(loss.detach())
        return {"loss": loss if self.training else loss + torch.rand(()), "logits": targets}


class Tell(TrainerCallback, ExportableState):
    """Writes the journal; its own state is a count of the epochs' ends."""

    def __init__(self) -> None:
        self.epochs = 0

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"epochs": self.epochs}}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        torch.rand(7)  # what draws at a start must not show

    def on_step_end(self, args_: Any, state: Any, control: Any, **more: Any) -> None:
        steps.amid(state.global_step)
        done, total = whole(ids), sum(each.item() for each in losses)
        ids.clear(), losses.clear()
        steps.done(state.global_step, total, done, more["model"], more["optimizer"])

    def on_epoch_end(self, args_: Any, state: Any, control: Any, **_: Any) -> None:
        self.epochs += 1
        if args.stop and self.epochs == int(args.stop):
            control.should_training_stop = True


def main() -> None:
    trainer = Trainer(
        Model(),  # type: ignore[arg-type] # any module will do
        TrainingArguments(
            output_dir=str(args.dir), max_steps=args.steps, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, learning_rate=0.02, logging_steps=4, eval_steps=5,
            eval_strategy="steps", save_strategy="steps", save_steps=5, save_total_limit=1,
            report_to=[], use_cpu=args.device != "cuda",
            disable_tqdm=True, remove_unused_columns=False, label_names=["targets"],
            lr_scheduler_type="cosine", dataloader_pin_memory=False,
            ddp_backend=BACKEND[args.device] if "RANK" in os.environ else None,
        ),
        train_dataset=Data(), eval_dataset=Data(), callbacks=[Tell()],
    )  # fmt: skip
    if not args.bare:
        from robust_slurm.integrations.transformers import RobustCallback

        trainer.add_callback(RobustCallback(trainer, directory=args.directory, every=args.every))
    train_loss = trainer.train().training_loss
    drop = ("runtime", "per_second")
    logs = [
        {k: v for k, v in entry.items() if not k.endswith(drop)}
        for entry in trainer.state.log_history
    ]
    epochs = [each.epochs for each in trainer.callback_handler.callbacks if isinstance(each, Tell)]
    steps.end(logs=logs, train_loss=train_loss.hex(), epochs=epochs)


main()
leave()
