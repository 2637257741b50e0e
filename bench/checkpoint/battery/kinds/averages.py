"""Averaged weights: EMA, SWA, target networks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from bench.checkpoint.battery.frame import WIDTH, Run, adamw, kind, loop, mse, net, sgd, x

EMA = r"(?i)extra\.(ema|swa|target|average)"


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@kind(EMA, options=("dict", "module", "object", "list"))
def ema(run: Run) -> Any:
    """An average that is updated in place: a dict of tensors, a module, an object, a list."""
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    shadow = list(average.parameters())

    class Ema:
        def __init__(self) -> None:
            self.updates = 0

        def state_dict(self) -> Any:
            return {"shadow": shadow, "updates": self.updates}

        def load_state_dict(self, state: Any) -> None:
            self.updates = state["updates"]
            for mine, saved in zip(shadow, state["shadow"], strict=True):
                mine.copy_(saved)

    kept = Ema()
    names = [n for n, _ in model.named_parameters()]
    given: Any = {
        "dict": dict(zip(names, shadow, strict=True)), "module": average, "object": kept,
        "list": shadow,
    }[run.option]  # fmt: skip

    @torch.no_grad()
    def after(step: int) -> None:
        kept.updates += 1
        decay = min(0.9, kept.updates / 10) if run.option == "object" else 0.9
        for mine, p in zip(shadow, model.parameters(), strict=True):
            mine.lerp_(p, 1 - decay)

    return loop(run, model, adamw(model), after=after, extra={"ema": given}, also=lambda: shadow)


@kind(EMA, options=("swa", "ema", "ema of buffers"))
def averaged_model(run: Run) -> Any:
    """torch's AveragedModel."""
    model = net()
    model.insert(1, nn.BatchNorm1d(WIDTH))
    settings: dict[str, Any] = (
        {} if run.option == "swa" else {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    )
    average = AveragedModel(model, use_buffers=run.option == "ema of buffers", **settings)
    return loop(
        run, model, sgd(model), after=lambda _: average.update_parameters(model),
        extra={"ema": average}, also=average.state_dict,
    )  # fmt: skip


@kind(EMA + "|scheduler", kills=(3, 5, 6, 7))
def swa_with_its_schedule(run: Run) -> Any:
    """SWA from step 4 on, SWALR, and update_bn at the end."""
    model = net()
    model.insert(1, nn.BatchNorm1d(WIDTH))
    optimizer = sgd(model)
    average = AveragedModel(model)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    flat = SWALR(optimizer, 0.02, anneal_epochs=2)

    def after(step: int) -> None:
        if step >= 4:
            average.update_parameters(model)
            flat.step()
        else:
            cosine.step()
        if step == run.steps - 1:
            update_bn([x(s) for s in range(3)], average)

    return loop(
        run, model, optimizer, after=after, also=average.state_dict,
        extra={"swa": average, "schedulers": [cosine, flat]},
    )  # fmt: skip


@kind(EMA + "|model", options=("state_dict", "copy_", "data"), also=("warned",), variants=3)
def swapped_after_save(run: Run) -> Any:
    """The averaged weights are swapped in for an evaluation, after save(), and out again."""
    model = net()
    average = copies(model)

    @torch.no_grad()
    def after(step: int) -> None:
        for n, p in model.named_parameters():
            average[n].lerp_(p, 0.1)

    @torch.no_grad()
    def late(step: int) -> None:
        if step % 3 != 2:
            return
        kept = copies(model)
        for source in (average, kept):
            for n, p in model.named_parameters():
                if run.option == "data":
                    p.data.copy_(source[n])
                elif run.option == "copy_":
                    p.copy_(source[n])
            if run.option == "state_dict":
                model.load_state_dict(source)
            model(x(99))

    return loop(run, model, sgd(model), after=after, late=late, extra={"ema": average})


@kind(EMA, options=("soft", "hard"))
def target_network(run: Run) -> Any:
    """A slow copy that gives the targets: soft updates, or a copy every 3 steps."""
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def after(step: int) -> None:
        for mine, p in zip(target.parameters(), model.parameters(), strict=True):
            if run.option == "soft":
                mine.lerp_(p, 0.05)
        if run.option == "hard" and step % 3 == 2:
            target.load_state_dict(model.state_dict())

    loss = lambda m, b: (m(b) - 0.9 * target(b) - 0.1 * b).square().mean()  # noqa: E731
    return loop(
        run, model, sgd(model), loss=loss, after=after, extra={"target": target},
        also=target.state_dict,
    )  # fmt: skip


@kind(EMA)
def two_horizons(run: Run) -> Any:
    """Two averages of different lengths, as post-hoc EMA keeps them, in a nested dict."""
    model = net()
    kept = {"ema": {decay: copies(model) for decay in ("0.9", "0.5")}}

    @torch.no_grad()
    def after(step: int) -> None:
        for decay, average in kept["ema"].items():
            for n, p in model.named_parameters():
                average[n].lerp_(p, 1 - float(decay))

    return loop(run, model, sgd(model), after=after, extra=kept, also=lambda: kept)


@kind(EMA + "|local|model", also=("warned",), unseeable=r"average|EMA|local|variable")
def ema_not_given(run: Run) -> Any:
    """An average that nobody hands over, and that the loss reads."""
    model = net()
    average = copies(model)

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        return mse(m, b) + (m[0].weight - average["0.weight"]).square().mean()

    @torch.no_grad()
    def after(step: int) -> None:
        for n, p in model.named_parameters():
            average[n].lerp_(p, 0.1)

    return loop(run, model, sgd(model), loss=loss, after=after, also=lambda: average)
