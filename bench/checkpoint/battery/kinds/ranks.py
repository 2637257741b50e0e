"""Several ranks: DDP, FSDP2, HSDP, tensor parallelism, local SGD, stages; and other numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from bench.checkpoint.battery.frame import Run, adamw, digest, kind, loop, mse, net, sgd, x
from bench.checkpoint.battery.kinds.models import Tied
from bench.checkpoint.battery.kinds.optimizers import (
    GaLore,
    Masters,
    Muon,
    OwnLoad,
    Sam,
    ScheduleFree,
    WithMore,
    half_mse,
    matrices,
)  # fmt: skip

SAME = ((2, 2),)
OTHER = ((1, 2), (2, 1), (2, 3))
EVERYTHING = r"(?i)model|optimi|rank|extra|loader"


def wrap(run: Run, model: Any, how: str) -> tuple[Any, Any]:
    """The model on all ranks, and the mesh for the Checkpointer."""
    if how == "ddp":
        return DistributedDataParallel(model), None
    if how == "hsdp":
        shape = (run.world, 1) if run.world != 2 else (1, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
        return _shard(model, mesh), mesh
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (run.world,), mesh_dim_names=("dp_shard",))
        return _shard(model, mesh), mesh
    mesh = init_device_mesh("cpu", (run.world,), mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh, plan), mesh


def batches(how: str) -> Any:
    """A rank's batch of a step: the same for all where they share the tensors' computation."""
    return (lambda step: x(step, rank=0)) if how == "tp" else x


def _shard(model: Any, mesh: Any) -> Any:
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@kind(EVERYTHING, options=("ddp", "fsdp2", "hsdp", "tp"), ranks=SAME, variants=8)
def parallel(run: Run) -> Any:
    """The same number of ranks."""
    model, mesh = wrap(run, net(), run.option)
    return loop(run, model, adamw(model), mesh=mesh, batch=batches(run.option))


@kind(EVERYTHING, options=("tp",), ranks=((1, 2), (2, 1)))
def resharded_tp(run: Run) -> Any:
    """AdamW and tensor parallelism on another number of ranks."""
    return resharded(run)


@kind(EVERYTHING, options=("ddp", "fsdp2", "hsdp"), ranks=OTHER)
def resharded(run: Run) -> Any:
    """AdamW on another number of ranks."""
    model, mesh = wrap(run, net(), run.option)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return loop(
        run, model, optimizer, mesh=mesh, extra={"scheduler": scheduler},
        after=lambda _: scheduler.step(), batch=batches(run.option),
    )  # fmt: skip


OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "schedule-free": lambda m: ScheduleFree(m.parameters()),
    "muon": lambda m: Muon(matrices(m)),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.02),
    "more in its state_dict": lambda m: WithMore(m.parameters(), 0.1),
    "sam": lambda m: Sam(m.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "galore": lambda m: GaLore(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2, history_size=3),
    "amsgrad, two groups": lambda m: torch.optim.Adam(
        [{"params": [p for p in m.parameters() if p.ndim == n], "lr": 0.01 * n} for n in (1, 2)],
        amsgrad=True,
    ),
}


@kind(EVERYTHING, options=tuple(OPTIMIZERS), ranks=((1, 2), (2, 1)), also=("refused",))
def resharded_optimizer(run: Run) -> Any:
    """Other optimizers on another number of ranks, DDP."""
    model, mesh = wrap(run, net(), "ddp")
    optimizer = OPTIMIZERS[run.option](model)

    def update(step: int) -> None:
        def closure() -> Any:
            model.zero_grad()
            loss = mse(model, x(step))
            loss.backward()
            return loss

        optimizer.step(closure if run.option in ("sam", "lbfgs") else None)

    return loop(run, model, optimizer, update=update, mesh=mesh)


@kind(EVERYTHING, options=("ddp", "fsdp2", "ddp, own load"), ranks=((1, 2), (2, 1)))
def resharded_masters(run: Run) -> Any:
    """bf16 parameters with 32-bit moments and masters, on another number of ranks."""
    model, mesh = wrap(run, net().bfloat16(), run.option.partition(",")[0])
    made = OwnLoad if "own" in run.option else Masters
    return loop(run, model, made(model.parameters()), loss=half_mse, mesh=mesh)


class Half(nn.Module):
    """A part in bf16, a part in 32 bits, frozen layers, running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = net(0), nn.BatchNorm1d(16), net(1).bfloat16()
        self.a[0].requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.b(self.norm(self.a(batch)).bfloat16())


@kind(
    EVERYTHING,
    options=("tied", "mixed", "ema", "values", "list"),
    ranks=((1, 2), (2, 1)),
    also=("refused",),
)
def resharded_model(run: Run) -> Any:
    """Tied weights, mixed types, EMA, plain values, a list of two models, DDP."""
    model, mesh = wrap(run, {"tied": Tied, "mixed": Half}.get(run.option, net)(), "ddp")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    extra: dict[str, Any] = {}
    values = {"list": [], "tensor": torch.zeros(3), "dict": {"a": 1}}
    average = copy.deepcopy(model.module).requires_grad_(False)
    if run.option == "ema":
        extra = {"ema": average}
    if run.option == "values":
        extra = dict(values)

    @torch.no_grad()
    def after(step: int) -> None:
        values["list"].append(step)  # type: ignore[attr-defined]
        values["tensor"].add_(step)  # type: ignore[attr-defined]
        values["dict"][str(step)] = step  # type: ignore[index]
        for mine, p in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(p.to(mine.dtype), 0.1)

    hand = {"model": [model, net(5)]} if run.option == "list" else {}
    return loop(run, model, optimizer, after=after, extra=extra, mesh=mesh, hand=hand)


@kind(EVERYTHING, options=("ddp", "tied fsdp2", "mixed precision"), ranks=SAME)
def parallel_models(run: Run) -> Any:
    """BatchNorm and frozen layers with DDP; tied weights and a policy of types with FSDP2."""
    if run.option == "ddp":
        model: Any = DistributedDataParallel(Half())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        return loop(run, model, optimizer)
    mesh = init_device_mesh("cpu", (run.world,), mesh_dim_names=("dp_shard",))
    if run.option == "tied fsdp2":
        model = fully_shard(Tied(), mesh=mesh)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(net(), mesh=mesh, mp_policy=policy)
    return loop(run, model, adamw(model), mesh=mesh)


@kind(r"(?i)hook|powersgd|model", ranks=((2, 2), (1, 1)), also=("warned", "refused"))
def power_sgd(run: Run) -> Any:
    """PowerSGD's error feedback, in a communication hook of DDP."""
    model = DistributedDataParallel(net())
    state = powerSGD_hook.PowerSGDState(
        None, 1, start_powerSGD_iter=2, min_compression_rate=0.1, use_error_feedback=True
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return loop(run, model, sgd(model))


@kind(r"(?i)hook|model", ranks=SAME)
def compression_hook(run: Run) -> Any:
    """A communication hook without a state."""
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return loop(run, model, sgd(model))


@kind(
    r"(?i)optimi|averag|hook|model",
    ranks=SAME,
    also=("warned", "refused"),
    variants=3,
    hazard=True,  # the ranks part in the third step, and that is said
)
def post_local_sgd(run: Run) -> Any:
    """torch's PostLocalSGDOptimizer: averages every third step."""
    model = DistributedDataParallel(net())
    state = post_local.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=3, warmup_steps=2)
    return loop(run, model, PostLocalSGDOptimizer(sgd(model), averager))


@kind(r"(?i)optimi", ranks=SAME, also=("refused",))
def zero(run: Run) -> Any:
    """ZeroRedundancyOptimizer."""
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    return loop(run, model, optimizer)


@kind(r"(?i)model|rank|parameters", ranks=SAME, options=("diloco", "local sgd"))
def local_training(run: Run) -> Any:
    """DiLoCo: inner steps alone, an outer Nesterov step every third one; or plain averaging."""
    model = net()
    inner = adamw(model)
    anchor = [p.detach().clone() for p in model.parameters()]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def after(step: int) -> None:
        if step % 3 != 2:
            return
        for p, a in zip(model.parameters(), anchor, strict=True):
            mean = p.detach().clone()
            dist.all_reduce(mean)
            mean /= run.world
            a.grad = a - mean
            if run.option == "local sgd":
                p.copy_(mean)
        if run.option == "diloco":
            outer.step()
            for p, a in zip(model.parameters(), anchor, strict=True):
                p.copy_(a)

    hand = {"optimizer": {"inner": inner, "outer": outer}} if run.option == "diloco" else {}
    return loop(run, model, inner, after=after, hand=hand)


@kind(r"(?i)model|rank|mesh", ranks=SAME, options=("mesh", "no mesh"))
def pipeline(run: Run) -> Any:
    """Two stages by hand: rank 0 sends activations, rank 1 sends gradients."""
    stage = net(run.rank)
    optimizer = adamw(stage)
    given = {"mesh": {"pp": 2}} if run.option == "mesh" else {}
    ckpt = run.checkpointer(model=stage, optimizer=optimizer, **given)
    for step in range(ckpt.resume(), run.steps):
        if run.rank == 0:
            out = stage(x(step))
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            received = torch.empty(8, 16)
            dist.recv(received, 0)
            received.requires_grad_()
            stage(received).square().mean().backward()
            assert received.grad is not None
            dist.send(received.grad, 0)
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step + 1)
    found = digest(stage.state_dict())
    ckpt.close()
    return found


@kind(r"(?i)model|extra|generator", ranks=SAME)
def rank_specific(run: Run) -> Any:
    """Generators, counters and loaders that differ from rank to rank."""
    model = DistributedDataParallel(net())
    torch.manual_seed(run.rank)
    noise = torch.Generator().manual_seed(run.rank)
    seen: list[int] = []
    loader = StatefulDataLoader([x(i)[run.rank] for i in range(80)], 4, shuffle=True)
    optimizer = sgd(model)
    ckpt = run.checkpointer(
        model=model, optimizer=optimizer, loader=loader, extra={"noise": noise, "seen": seen}
    )
    step = ckpt.resume()
    for batch in loader:
        batch = batch + torch.randn(batch.shape, generator=noise) + torch.randn(batch.shape)
        mse(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(step + run.rank)
        step += 1
        ckpt.save(step)
        if step == run.steps:
            break
    found = digest([model.state_dict(), seen])
    ckpt.close()
    return found


@kind(r"(?i)model|rank", ranks=SAME)
def accumulated(run: Run) -> Any:
    """no_sync() for all but the last of three micro-batches."""
    model = DistributedDataParallel(net())
    optimizer = adamw(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer)
    for step in range(ckpt.resume(), run.steps):
        for micro in range(3):
            model.require_backward_grad_sync = micro == 2
            (mse(model, x(step * 3 + micro)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step + 1)
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind(r"(?i)model|rank|optimi", ranks=SAME, options=("replicated", "sharded"))
def own_dtensors(run: Run) -> Any:
    """DTensors that the script makes itself."""
    mesh = init_device_mesh("cpu", (run.world,), mesh_dim_names=("tp",))
    from torch.distributed.tensor import Replicate, Shard

    place = Replicate() if run.option == "replicated" else Shard(0)
    model: Any = nn.Linear(16, 16, bias=False)
    torch.manual_seed(0)
    weight = torch.randn(16, 16)
    model.weight = nn.Parameter(distribute_tensor(weight, mesh, [place]))
    optimizer = sgd(model)

    def loss(m: Any, b: torch.Tensor) -> Any:
        batch = distribute_tensor(b, mesh, [Replicate()])
        return (m(batch) - batch).square().mean().full_tensor()

    return loop(run, model, optimizer, loss=loss, mesh=mesh, batch=batches("tp"))
