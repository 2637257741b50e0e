"""megatron.core's DistributedOptimizer, in bfloat16 with 32-bit master weights.

It asks for CUDA by name. There is none here, so ``WithoutCuda`` stands in: tensors that are wanted
on a GPU are made on the CPU, and say that they are CUDA's. All else is the real one.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import warnings

warnings.filterwarnings("ignore")

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

from ckpt_training import WIDTH, Samples, options, seed  # isort: skip
from framework_training import Steps
from teardown import leave
from torch import nn

import robust_slurm


class WithoutCuda(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


args = options("naive")
torch.set_num_threads(1)
torch.cuda.current_device = lambda: torch.device("cpu")
seed(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
steps = Steps(args, rank)
parallel_state.initialize_model_parallel()
with WithoutCuda():
    network = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True), network
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [model],
    )  # fmt: skip
    checkpointer, step = None, 0
    if not args.bare:
        from robust_slurm.integrations.megatron import MegatronOptimizerState

        checkpointer = robust_slurm.Checkpointer(
            model=model.module,
            optimizer=MegatronOptimizerState(optimizer),
            directory=args.directory,
            every=args.every,
        )
        step = checkpointer.resume()
    while step < args.steps:
        step += 1
        number, inputs, targets = Samples()[(step * world + rank) % len(Samples())]
        model.zero_grad_buffer()
        loss = (model(inputs.bfloat16()).float() - targets).square().mean()
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        steps.amid(step)
        steps.done(step, loss.item(), [number], network, optimizer.chained_optimizers[0].optimizer)
        if checkpointer is not None:
            checkpointer.save(step)
    masters = [float(p.double().sum()).hex() for g in optimizer.param_groups for p in g["params"]]
    if checkpointer is not None:
        checkpointer.close()
steps.end(masters=masters)
leave()
