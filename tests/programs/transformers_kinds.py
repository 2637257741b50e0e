"""Hugging Face's Trainer as users write it, a kind of training for each name: KIND …

``--out`` gets a checksum of all weights at the end, and what else counts.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import json
import os
import signal
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

# First: it needs torch's compiler, which ckpt_training leaves out.
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

import torch  # isort: skip
from ckpt_training import WIDTH, Samples, options, seed
from teardown import leave
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

args = options("kind", "at", "out")
env = os.environ
torch.set_num_threads(1)
warnings.filterwarnings("ignore")
seed(1)
batches = 0
NEW = hasattr(TrainingArguments, "train_sampling_strategy")  # in place of group_by_length


class Data(Dataset[dict[str, Any]]):
    """23 samples: epochs end within an accumulation."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i >= len(self):
            raise IndexError(i)  # group_by_length iterates over it
        number, inputs, targets = Samples()[i]
        return {"number": torch.tensor(number), "inputs": inputs, "targets": targets}


class Words(Data):
    """With lengths, for the sampler that groups by them."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**super().__getitem__(i), "input_ids": torch.zeros(1 + i * 7 % 5)}


class Noisy(Data):
    def __getitem__(self, i: int) -> dict[str, Any]:
        found = super().__getitem__(i)
        return {**found, "inputs": found["inputs"] + 0.1 * torch.randn(WIDTH)}


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.length):
            yield Data()[i % 23]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(
        self, number: Tensor, inputs: Tensor, targets: Tensor, **_: Any
    ) -> dict[str, Tensor]:
        loss = (self.network(inputs) - targets).square().mean()
        if self.training:
            die()
            self.seen = (self.seen * 31 + number.sum()) % 1_000_003  # the order of the data
        return {"loss": loss if self.training else loss + torch.rand(()), "logits": targets}


def die() -> None:
    """Die in the ``--at``-th batch of this process, if the test wants that."""
    global batches
    batches += 1
    if args.at and batches == int(args.at):
        os.kill(os.getpid(), signal.SIGKILL)


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    names = ("number", "inputs", "targets")
    return {name: torch.stack([each[name] for each in samples]) for name in names}


class Plain(Trainer):
    """A Trainer with a DataLoader of the user's own."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(Data(), batch_size=4, shuffle=True, num_workers=1, collate_fn=collate)


def made(kind: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return a kind of Trainer, TrainingArguments and the Trainer's arguments."""
    own: dict[str, Any] = {"gradient_accumulation_steps": 2}
    given: dict[str, Any] = {"train_dataset": Data()}
    by_epoch = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    if kind in ("epochs", "resume_given", "own_loader"):
        pass
    elif kind == "steps":
        own |= {"max_steps": 11, "eval_strategy": "steps", "eval_steps": 3}
    elif kind == "plateau":
        own = {"lr_scheduler_type": "reduce_lr_on_plateau", **by_epoch}
    elif kind == "grouped":
        own |= {"train_sampling_strategy": "group_by_length"} if NEW else {"group_by_length": True}
        given["train_dataset"] = Words()
    elif kind == "early_stop":
        own |= {"num_train_epochs": 9, "load_best_model_at_end": True, **by_epoch}
        own |= {"metric_for_best_model": "eval_loss"}
        given["callbacks"] = [EarlyStoppingCallback(1)]
    elif kind == "stream":
        own |= {"max_steps": 9}
        given["train_dataset"] = Stream(200)
    elif kind == "short_stream":
        own |= {"max_steps": 9}
        given["train_dataset"] = Stream(24)
    elif kind == "workers":
        own |= {"dataloader_num_workers": 2}
    elif kind == "persistent":
        own |= {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    elif kind == "noisy":
        given["train_dataset"] = Noisy()
    elif kind == "noisy_workers":
        own |= {"dataloader_num_workers": 2}
        given["train_dataset"] = Noisy()
    elif kind == "bf16":
        own |= {"bf16": True}
    elif kind == "model_init":
        given["model_init"] = Model
    else:
        raise ValueError(kind)
    return Plain if kind == "own_loader" else Trainer, own, given


def by_hand() -> None:
    """Train with accelerate in a loop of one's own: accumulation, a schedule, a stateful loader."""
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=True, use_seedable_sampler=True
        ),
    )  # fmt: skip
    model: Any = Model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader: Any = DataLoader(Data(), batch_size=4, shuffle=True, collate_fn=collate)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    done, ckpt = {"epoch": 0, "step": 0}, None
    if not args.bare:
        import robust_slurm

        extra = {"done": done, "schedule": schedule}
        ckpt = robust_slurm.Checkpointer(
            model=model, optimizer=optimizer, loader=loader, extra=extra,
            directory=args.directory, every=1,
        )  # fmt: skip
        ckpt.resume()
    for epoch in range(done["epoch"], 4):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done |= {"step": done["step"] + 1, "epoch": epoch + loader.end_of_dataloader}
                if ckpt is not None:
                    ckpt.save(done["step"])
    if ckpt is not None:
        ckpt.close()
    finish(accelerator.unwrap_model(model), done)


def finish(model: Any, end: dict[str, Any]) -> None:
    if env.get("RANK", "0") == "0":
        with open(args.out, "w") as file:
            json.dump({"weights": checksum(model.state_dict()), **end}, file)


def main() -> None:
    kind, own, given = made(args.kind)
    theirs = args.dir / ("theirs-bare" if args.bare else "theirs")
    settings: dict[str, Any] = {
        "output_dir": str(theirs), "num_train_epochs": 4, "per_device_train_batch_size": 4,
        "learning_rate": 0.02, "logging_steps": 3, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "remove_unused_columns": False, "label_names": ["targets"],
        "save_strategy": "no", "dataloader_pin_memory": False, "save_total_limit": 2,
        "ddp_backend": "gloo" if "RANK" in env else None,
    }  # fmt: skip
    model = None if "model_init" in given else Model()
    trainer: Any = kind(
        model, TrainingArguments(**settings | own), eval_dataset=Data(), data_collator=collate,
        **given,
    )  # fmt: skip
    resume = None
    if args.kind == "resume_given":
        given_dir = args.dir / "given"
        resume = str(given_dir)
        if not given_dir.exists():
            trainer.save_model(resume)
            trainer.state.train_batch_size = 4
            trainer.state.save_to_json(f"{resume}/trainer_state.json")
    if not args.bare:
        from robust_slurm.integrations.transformers import RobustCallback

        trainer.add_callback(RobustCallback(trainer, directory=args.directory, every=1))
    train_loss = trainer.train(resume_from_checkpoint=resume).training_loss
    drop = ("runtime", "per_second", "preparation_time")
    logs = [
        {k: v for k, v in entry.items() if not k.endswith(drop)}
        for entry in trainer.state.log_history
    ]
    end = {"loss": train_loss, "logs": logs, "step": trainer.state.global_step}
    finish(trainer.model, {**end, "epoch": trainer.state.epoch})


def checksum(state: dict[str, Tensor]) -> int:
    return zlib.crc32(b"".join(each.contiguous().numpy().tobytes() for each in state.values()))


by_hand() if args.kind == "by_hand" else main()
leave()
