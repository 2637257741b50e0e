"""megatron.core's DistributedOptimizer, in bfloat16 with 32-bit master weights.

It asks for CUDA by name. There is none here, so ``WithoutCuda`` stands in: tensors that are wanted
on a GPU are made on the CPU, and say that they are CUDA's. All else is the real one.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import warnings

warnings.filterwarnings("ignore")

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch.overrides import TorchFunctionMode

from ckpt_training import WIDTH, Samples, options, seed  # isort: skip
from framework_training import Steps
from teardown import leave
from torch import Tensor, nn

import robust_slurm

BATCHES = 2  # of a rank and step, one sample each


class WithoutCuda(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


class Layer(nn.Module):
    """An MLP whose middle is divided among the ranks of a tensor group."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        given = {"config": config, "init_method": config.init_method, "bias": True}
        self.up = ColumnParallelLinear(WIDTH, 16, gather_output=False, **given)
        self.down = RowParallelLinear(
            16, WIDTH, input_is_parallel=True, skip_bias_add=False, **given
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x)[0].tanh())[0]


class Stage(MegatronModule):
    """The layers of one pipeline stage."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        count = config.num_layers // config.pipeline_model_parallel_size
        self.layers = nn.Sequential(*(Layer(config) for _ in range(count)))
        last = parallel_state.is_pipeline_last_stage()
        self.head = nn.Linear(WIDTH, 1) if last else nn.Identity()
        self._before: Tensor | None = None

    def set_input_tensor(self, before: list[Tensor | None]) -> None:
        self._before = before[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x if self._before is None else self._before))


def forward_step(data: Iterator[Any], model: nn.Module) -> tuple[Tensor, Any]:
    number, x, target = next(data)
    ids.append(number)

    def loss_of(output: Tensor) -> tuple[Tensor, float]:
        loss = (output.float() - target).square().mean()
        return loss, loss.item()

    return model(x.bfloat16().reshape(1, 1, WIDTH)), loss_of


args = options("tp", "pp")
torch.set_num_threads(1)
torch.cuda.current_device = lambda: torch.device("cpu")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
steps = Steps(args, rank)
tp, pp = int(args.tp or 1), int(args.pp or 1)
parallel_state.initialize_model_parallel(tp, pp)
reader, readers = parallel_state.get_data_parallel_rank(), world // tp // pp
seed(1)
with WithoutCuda():
    config = TransformerConfig(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=2, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, use_cpu_initialization=True, batch_p2p_sync=False,
    )  # fmt: skip
    network = Stage(config).bfloat16()
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
            mesh={"pp": pp, "dp": readers, "tp": tp},
            directory=args.directory,
            every=args.every,
        )
        step = checkpointer.resume()
    while step < args.steps:
        step += 1
        first = (step * readers + reader) * BATCHES
        samples = [Samples()[(first + i) % len(Samples())] for i in range(BATCHES)]
        ids: list[int] = []
        model.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(samples), model=[model],
            num_microbatches=BATCHES, seq_length=1, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        model.finish_grad_sync()
        optimizer.step()
        steps.amid(step)
        inner = optimizer.chained_optimizers[0].optimizer
        steps.done(step, sum(losses, 0.0), ids, network, inner)
        if checkpointer is not None:
            checkpointer.save(step)
    masters = [float(p.double().sum()).hex() for g in optimizer.param_groups for p in g["params"]]
    if checkpointer is not None:
        checkpointer.close()
steps.end(masters=masters)
leave()
