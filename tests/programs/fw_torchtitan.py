"""torchtitan's Trainer with its llama3 debug model, FSDP2, AdamW, warm-up, accumulation.

It asks for a GPU, and one of its modules for Triton. There is neither here, so ``torch.cpu`` gets
the functions of ``torch.cuda`` that are called, and that module, which is for expert parallelism
alone, is left out. So is the inner attention, which cannot train on a CPU: llama3's is replaced by
torchtitan's own plain one. All else is the real one.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

warnings.filterwarnings("ignore")

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.memory_stats = lambda device=None: {}


class NoKernels(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: sys.exit(f"{name}: there is no Triton here")


kernels = "torchtitan.distributed.minimal_async_ep.kernels"
sys.modules[kernels] = NoKernels(kernels)

import torchtitan.distributed.utils
import torchtitan.trainer
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from ckpt_training import options  # isort: skip # after torchtitan, which needs the compiler
from framework_training import Steps
from teardown import leave
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

BATCH, LENGTH, WORDS = 2, 16, 2048

torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None  # by a barrier that is NCCL's
torchtitan.trainer.time = SimpleNamespace(sleep=lambda _: None, perf_counter=time.perf_counter)
args = options("workers")
for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
    os.environ.setdefault(name, value)
if "MASTER_ADDR" not in os.environ:
    from srun_wrapper.agent.processes.ports import free_port

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
steps = Steps(args, rank)


class NoTokens(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORDS


class Samples(IterableDataset[Any]):
    """Sample i: its number as the first word, then words that follow from it."""

    def __init__(self, reader: int) -> None:
        self.reader, self.at = reader, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            own = torch.Generator().manual_seed(1000 * self.reader + self.at)
            words = torch.randint(0, WORDS, (LENGTH + 1,), generator=own)
            words[0] = self.at
            with (args.dir / f"read-{rank}").open("a") as file:
                file.write(f"{steps.journal.epoch} {self.at}\n")
            self.at += 1
            yield {"input": words[:-1], "positions": torch.arange(LENGTH)}, words[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, **given: Any):
        super().__init__(
            Samples(dp_rank), dp_rank=dp_rank, dp_world_size=given["dp_world_size"],
            batch_size=local_batch_size, num_workers=config.num_workers,
            snapshot_every_n_steps=given["snapshot_every_n_steps"],
        )  # fmt: skip


def main() -> None:
    llama = model_registry("debugmodel")
    del llama.model.layers[1:]
    for layer in llama.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ours: dict[str, Any] = {}
    if not args.bare:
        from robust_slurm.integrations.torchtitan import RobustCheckpointManager

        ours["checkpoint"] = RobustCheckpointManager.Config(
            directory=args.directory, every=args.every
        )
    trainer: Any = Trainer.Config(
        model_spec=llama, tokenizer=NoTokens.Config(), loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=8e-3), lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3),
        training=TrainingConfig(
            local_batch_size=BATCH, global_batch_size=2 * BATCH * world, seq_len=LENGTH,
            steps=args.steps, disable_cuda_graphs=True,
        ),
        dataloader=Loader.Config(num_workers=int(args.workers or 0)),
        metrics=MetricsProcessor.Config(log_freq=1), dump_folder=str(args.dir),
        # Its default wants a later torch than 2.13 for more than one rank.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None, debug=DebugConfig(seed=1), **ours,
    ).build()  # fmt: skip
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # its own operation is NCCL's
    ids: list[int] = []
    losses: list[float] = []
    process, log, step = trainer.post_dataloading_process, trainer.metrics_processor.log, None

    def processed(inputs: Any, labels: Any) -> Any:
        ids.extend(inputs["input"][:, 0].tolist())
        if len(ids) > BATCH:
            steps.amid(trainer.step)  # the second backward pass of two is to come
        return process(inputs, labels)

    def logged(number: int, average: float, *more: Any, **named: Any) -> None:
        losses.append(average)
        log(number, average, *more, **named)

    step = trainer.train_step

    def stepped(batches: Any) -> None:
        step(batches)
        model, optimizer = trainer.model_parts[0], trainer.optimizers.optimizers[0]
        steps.done(trainer.step, losses.pop(), ids[:], model, optimizer)
        ids.clear()

    trainer.post_dataloading_process, trainer.metrics_processor.log = processed, logged
    trainer.train_step = stepped
    trainer.train()
    rates = trainer.lr_schedulers.schedulers[0].get_last_lr()
    steps.end(tokens=trainer.ntokens_seen, rates=[rate.hex() for rate in rates])
    trainer.close()


main()
leave()
