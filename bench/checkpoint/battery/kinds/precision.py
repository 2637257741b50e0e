"""Mixed precision, accumulation, checkpointed activations, clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.checkpoint.battery.frame import Run, adamw, digest, kind, loop, mse, net, sgd, x

SCALER = r"(?i)scaler|loss.scale|extra\.scal"


@kind(SCALER, options=("given", "grows often"))
def grad_scaler(run: Run) -> Any:
    """torch's GradScaler; the loss overflows at step 4."""
    model = net()
    optimizer = sgd(model)
    interval = 2 if run.option == "grows often" else 2000
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=interval)

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = scaler.scale(mse(m, b) * (float("inf") if b[0, 0] > 1.5 else 1))
        return found

    def update(step: int) -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return loop(
        run, model, optimizer, loss=loss, update=update, extra={"scaler": scaler},
        also=scaler.state_dict,
    )  # fmt: skip


@kind(SCALER, also=("warned",), unseeable=r"scaler|local|variable")
def scaler_not_given(run: Run) -> Any:
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def update(step: int) -> None:
        scaler.step(optimizer)
        scaler.update()

    return loop(
        run, model, optimizer, update=update, also=scaler.state_dict,
        loss=lambda m, b: scaler.scale(mse(m, b)),
    )  # fmt: skip


@kind(SCALER)
def own_loss_scale(run: Run) -> Any:
    """Dynamic loss scale in a dict, as fairseq's and apex's."""
    model = net()
    optimizer = sgd(model)
    scale = {"value": 256.0, "good": 0}

    def update(step: int) -> None:
        for p in model.parameters():
            p.grad.div_(scale["value"])  # type: ignore[union-attr]
        optimizer.step()
        scale["good"] += 1
        if scale["good"] == 3:
            scale.update(value=scale["value"] * 2, good=0)

    return loop(
        run, model, optimizer, update=update, extra={"scale": scale}, also=lambda: scale,
        loss=lambda m, b: mse(m, b) * scale["value"],
    )  # fmt: skip


@kind("model|optimizer", options=("autocast", "pure bf16"))
def bf16(run: Run) -> Any:
    """autocast of 32-bit weights, or all in bf16."""
    model = net()
    if run.option == "pure bf16":
        return loop(run, model.bfloat16(), adamw(model), loss=lambda m, b: mse(m, b.bfloat16()))

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mse(m, b)

    return loop(run, model, adamw(model), loss=loss)


@kind("gradient|save|accumul", options=("2", "3"), variants=4)
def accumulation(run: Run) -> Any:
    """Several backward passes a step, saved once a step."""
    model = net()
    optimizer = adamw(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer)
    for step in range(ckpt.resume(), run.steps):
        for micro in range(int(run.option)):
            (mse(model, x(step * 5 + micro)) / int(run.option)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step + 1)
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind("gradient", hazard=True, also=("warned",), kills=(3, 5))
def saved_in_accumulation(run: Run) -> Any:
    """save() after each micro-batch: gradients are in no snapshot."""
    model = net()
    optimizer = adamw(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer)
    for micro in range(ckpt.resume(), run.steps):
        (mse(model, x(micro)) / 2).backward()
        if micro % 2:
            optimizer.step()
            optimizer.zero_grad()
        ckpt.save(micro + 1)
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind("gradient", hazard=True, also=("warned",))
def saved_before_the_step(run: Run) -> Any:
    """save() between backward and the optimizer's step."""
    model = net()
    optimizer = adamw(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer)
    for step in range(ckpt.resume(), run.steps):
        mse(model, x(step)).backward()
        ckpt.save(step + 1)
        optimizer.step()
        optimizer.zero_grad()
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind("model|rng|generator", options=("reentrant", "not reentrant"))
def checkpointed_activations(run: Run) -> Any:
    """Gradient checkpointing with dropout."""
    model = net()
    drop = nn.Dropout(0.3)
    reentrant = run.option == "reentrant"

    def forward(batch: torch.Tensor) -> Any:
        hidden = model[0](batch)
        hidden = checkpoint(lambda h: drop(model[1](h)), hidden, use_reentrant=reentrant)
        return model[2](hidden)

    return loop(run, model, sgd(model), forward=forward)


@kind("model|gradient")
def zeroed_at_the_begin(run: Run) -> Any:
    """zero_grad() comes first in a step: save() finds used gradients, which nobody needs."""
    model = net()
    optimizer = adamw(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer)
    for step in range(ckpt.resume(), run.steps):
        optimizer.zero_grad()
        mse(model, x(step)).backward()
        optimizer.step()
        ckpt.save(step + 1)
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind("model", also=("warned",))
def nan_skipped(run: Run) -> Any:
    """A step whose loss is not finite is left out by the script, with its counter in extra."""
    model = net()
    optimizer = sgd(model)
    skipped = {"n": 0}

    def update(step: int) -> None:
        if step in (2, 5):
            skipped["n"] += 1
            return
        optimizer.step()

    return loop(
        run, model, optimizer, update=update, extra={"skipped": skipped}, also=lambda: skipped
    )


@kind("model|optimizer")
def offloaded(run: Run) -> Any:
    """The optimizer's state is moved away and back between steps: new tensors each time."""
    model = net()
    optimizer = adamw(model)

    def move(step: int) -> None:
        for state in optimizer.state.values():
            for name, value in state.items():
                state[name] = value.clone()

    return loop(run, model, optimizer, before=move)


@kind("model|gradient")
def gradients_kept(run: Run) -> Any:
    """zero_grad(set_to_none=False), and gradients as views of one buffer."""
    model = net()
    optimizer = sgd(model)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    ckpt = run.checkpointer(model=model, optimizer=optimizer)
    for step in range(ckpt.resume(), run.steps):
        mse(model, x(step)).backward()
        optimizer.step()
        flat.zero_()
        ckpt.save(step + 1)
    found = digest(model.state_dict())
    ckpt.close()
    return found


@kind("model", options=("centralised", "noise"))
def gradient_hooks(run: Run) -> Any:
    """Hooks that change gradients, one of them with random numbers."""
    model = net()
    change: Any = {
        "centralised": lambda g: g - g.mean(),
        "noise": lambda g: g + 0.01 * torch.randn_like(g),
    }[run.option]
    for p in model.parameters():
        p.register_hook(change)
    return loop(run, model, sgd(model))
