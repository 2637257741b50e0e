"""Lightning as users write it, a kind of training for each name: python lightning_kinds.py KIND …

The last line of its output is a checksum of all weights at the end, and what else counts.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import json
import logging
import os
import random
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from ckpt_training import WIDTH, Samples, options, seed
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from teardown import leave
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

args = options("kind", "at", "out")
env = os.environ
if "RANK" in env:
    env.setdefault("TORCHELASTIC_RUN_ID", "here")  # so that Lightning reads RANK and its kin
rank, world = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
seed(1)
batches = 0


def die() -> None:
    """Die in the ``--at``-th batch of this process, if the test wants that."""
    global batches
    batches += 1
    if args.at and batches == int(args.at):
        os.kill(os.getpid(), signal.SIGKILL)


class Noisy(Dataset[Any]):
    """Samples with random augmentation, from torch's generator of whoever reads them."""

    def __len__(self) -> int:
        return len(Samples())

    def __getitem__(self, i: int) -> Any:
        number, inputs, targets = Samples()[i]
        return number, inputs + 0.1 * torch.randn(WIDTH) + random.random(), targets


class Stream(IterableDataset[Any]):
    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for i in torch.randperm(self.length).tolist():
            yield Samples()[i]


class Module(pl.LightningModule):
    """Dropout, batch norm, AdamW, a schedule by step."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: Any) -> Tensor:
        numbers, inputs, targets = batch
        self.seen = (self.seen * 31 + numbers.sum()) % 1_000_003  # the order of the data
        return (self.network(inputs) - targets).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        die()
        if isinstance(batch, dict):
            return self.loss(batch["a"]) + self.loss(batch["b"])
        loss = self.loss(batch)
        self.log("mean", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, inputs, targets = batch
        self.log("val", (self.network(inputs) - targets).square().mean() + torch.rand(()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=8)


class Manual(Module):
    """Two optimizers in turn, as a GAN has them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        die()
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        first.step()
        second.zero_grad()
        self.manual_backward((self.other(batch[1]) - loss.detach()).square().mean())
        second.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW(self.network.parameters(), lr=0.02)
        second = torch.optim.SGD(self.other.parameters(), lr=0.05, momentum=0.9)
        steps = torch.optim.lr_scheduler.StepLR
        return [first, second], [steps(first, 3), steps(second, 4)]


class Plateau(Module):
    """A schedule that follows a metric of a validation long before the epoch's end."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return {
            "optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"},
        }  # fmt: skip


class StepPlateau(Plateau):
    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"] |= {"interval": "step", "frequency": 2}
        return found


class Ema(pl.Callback):
    """An average of the weights, with a state of its own; it is put in for each validation."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if not hasattr(self, "average"):
            self.average = {k: v.detach().clone() for k, v in module.network.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, value in module.network.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = {k: v.clone() for k, v in state["average"].items()}


def kinds() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    """Name → a module and the Trainer's options."""

    def loaded(make: Callable[[], Any], kind: type[Module] = Module) -> Any:
        module = kind()
        module.train_dataloader = make  # type: ignore[method-assign]
        return module

    def shuffled(kind: Any = DataLoader, **more: Any) -> Any:
        return kind(Samples(), batch_size=4, shuffle=True, **more)

    def workers(**more: Any) -> Any:
        return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2, **more)

    def two() -> Any:
        long, short = (DataLoader(Samples(), batch_size=b, shuffle=True) for b in (2, 8))
        return {"a": long, "b": short}

    def streams() -> Any:
        return {"a": DataLoader(Stream(24), batch_size=2), "b": DataLoader(Stream(8), batch_size=3)}

    def averaging() -> Any:
        from lightning.pytorch.callbacks import EMAWeightAveraging

        return EMAWeightAveraging(decay=0.9)

    def averages() -> Any:
        return StochasticWeightAveraging(0.01, swa_epoch_start=2)

    class NoNorm(Module):
        def __init__(self) -> None:
            super().__init__()
            del self.network[1]

    epochs = {"max_epochs": 4}
    return {
        "epochs": lambda: (Module(), epochs),
        "ckpt_given": lambda: (Module(), epochs),
        "steps": lambda: (Module(), {"max_steps": 21}),
        "accumulate": lambda: (
            Module(),
            epochs | {"accumulate_grad_batches": 4, "val_check_interval": 3},
        ),
        "clip": lambda: (Module(), epochs | {"gradient_clip_val": 0.3}),
        "val_often": lambda: (Module(), epochs | {"val_check_interval": 2}),
        "val_by_steps": lambda: (
            Module(),
            epochs | {"val_check_interval": 5, "check_val_every_n_epoch": None},
        ),
        "manual": lambda: (Manual(), epochs),
        "plateau": lambda: (Plateau(), epochs | {"val_check_interval": 4}),
        "step_plateau": lambda: (StepPlateau(), epochs | {"val_check_interval": 2}),
        "early_stop": lambda: (
            Module(),
            {"max_epochs": 9, "callbacks": [EarlyStopping("val", patience=1)]},
        ),
        "train_mean": lambda: (
            Module(),
            {"max_epochs": 9, "callbacks": [EarlyStopping("mean", patience=0)]},
        ),
        "ema": lambda: (Module(), epochs | {"callbacks": [Ema()]}),
        "weight_averaging": lambda: (Module(), epochs | {"callbacks": [averaging()]}),
        "swa": lambda: (NoNorm(), {"max_epochs": 5, "callbacks": [averages()]}),
        "swa_norm": lambda: (Module(), {"max_epochs": 5, "callbacks": [averages()]}),
        "noisy": lambda: (loaded(lambda: DataLoader(Noisy(), batch_size=4, shuffle=True)), epochs),
        "workers": lambda: (loaded(workers), epochs),
        "persistent_noisy": lambda: (loaded(lambda: workers(persistent_workers=True)), epochs),
        "persistent": lambda: (
            loaded(lambda: shuffled(num_workers=2, persistent_workers=True)),
            epochs,
        ),
        "stateful": lambda: (loaded(lambda: shuffled(StatefulDataLoader)), epochs),
        "stateful_workers": lambda: (
            loaded(lambda: shuffled(StatefulDataLoader, num_workers=2)),
            epochs,
        ),
        "stateful_noisy": lambda: (
            loaded(lambda: StatefulDataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)),
            epochs,
        ),
        "stream": lambda: (loaded(lambda: DataLoader(Stream(), batch_size=4)), epochs),
        "stream_steps": lambda: (
            loaded(lambda: DataLoader(Stream(), batch_size=4)),
            {"max_steps": 21},
        ),
        "two_loaders": lambda: (loaded(two), epochs),
        "two_streams": lambda: (loaded(streams), epochs),
        "reload": lambda: (Module(), epochs | {"reload_dataloaders_every_n_epochs": 1}),
        "limited": lambda: (Module(), epochs | {"limit_train_batches": 4}),
    }


def checkpoint_given() -> str:
    """Return a checkpoint file of Lightning's own, after 3 steps."""
    file = args.dir / "given.ckpt"
    if not file.exists():
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(accelerator="cpu", max_steps=3, default_root_dir=args.dir, **quiet)
        args.at = ""
        trainer.fit(Module())
        trainer.save_checkpoint(file)
    seed(1)
    return str(file)


def main() -> None:
    given = {"ckpt_path": checkpoint_given()} if args.kind == "ckpt_given" else {}
    module, more = kinds()[args.kind]()
    callbacks = more.pop("callbacks", []) if "callbacks" in more else []
    if not args.bare:
        from robust_slurm.integrations.lightning import RobustCallback

        place = os.getpid() % 2  # before or after the others, that must not matter
        callbacks.insert(place, RobustCallback(directory=args.directory, every=1))
    parallel = "ddp_find_unused_parameters_true" if args.kind == "manual" else "ddp"
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=parallel if world > 1 else "auto", logger=False,
        callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=args.dir, **more,
    )  # fmt: skip
    trainer.fit(module, **given)
    found = [
        module.state_dict(),
        *(each.state_dict() for each in callbacks if isinstance(each, Ema)),
    ]
    end = {"weights": checksum(found), "step": trainer.global_step, "epoch": trainer.current_epoch}
    if rank == 0:
        with open(args.out, "w") as file:
            json.dump(end, file)


def checksum(found: Any) -> int:
    if isinstance(found, dict):
        return checksum(list(found.values()))
    if isinstance(found, list):
        return zlib.crc32(repr([checksum(each) for each in found]).encode())
    return zlib.crc32(found.detach().contiguous().numpy().tobytes())


main()
leave()
