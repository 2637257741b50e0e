"""Learning-rate schedulers, early stopping, and other schedules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler as lrs

from bench.checkpoint.battery.frame import Run, adamw, kind, loop, mse, net, sgd, x

SCHEDULER = r"(?i)schedul|extra\.sched"


class Warmup:
    """A function of the step that counts its own calls."""

    def __init__(self) -> None:
        self.calls, self.peak = 0, 1.0

    def __call__(self, step: int) -> float:
        self.calls += 1
        self.peak = self.peak * 0.97
        return min(1.0, (step + 1) / 4) * self.peak


TORCH: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.7),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, 1, 6),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2, 2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.3, total_steps=12),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.2, 3),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda s: 0.9**s),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda s: 0.9),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, 1, 3), lrs.CosineAnnealingLR(o, 6)], [3]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.StepLR(o, 3, 0.5), lrs.ExponentialLR(o, 0.9)]
    ),
    "nested": lambda o: lrs.ChainedScheduler(
        [
            lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, 1, 2), lrs.StepLR(o, 2, 0.7)], [2]),
            lrs.ExponentialLR(o, 0.9),
        ]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=4),
    "a LambdaLR that counts": lambda o: lrs.LambdaLR(o, Warmup()),
}


@kind(SCHEDULER, options=tuple(TORCH))
def torch_scheduler(run: Run) -> Any:
    """Each of torch's, stepped before save()."""
    model = net()
    optimizer = sgd(model)
    scheduler = TORCH[run.option](optimizer)
    rates: list[Any] = []

    def after(step: int) -> None:
        scheduler.step()
        rates[:] = [g["lr"] for g in optimizer.param_groups]

    return loop(
        run, model, optimizer, after=after, extra={"scheduler": scheduler},
        also=lambda: rates,
    )  # fmt: skip


@kind(SCHEDULER)
def plateau(run: Run) -> Any:
    """ReduceLROnPlateau reads a loss."""
    model = net()
    optimizer = sgd(model)
    scheduler = lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)

    def after(step: int) -> None:
        scheduler.step(float(mse(model, x(99))))

    return loop(run, model, optimizer, after=after, extra={"scheduler": scheduler})


@kind(SCHEDULER, also=("warned",))
def scheduler_not_given(run: Run) -> Any:
    model = net()
    optimizer = sgd(model)
    scheduler = lrs.StepLR(optimizer, 3, 0.5)
    return loop(run, model, optimizer, after=lambda _: scheduler.step())


@kind(SCHEDULER + "|optimizer", hazard=True, also=("warned",))
def scheduler_after_save(run: Run) -> Any:
    model = net()
    optimizer = sgd(model)
    scheduler = lrs.ExponentialLR(optimizer, 0.8)
    return loop(
        run, model, optimizer, late=lambda _: scheduler.step(), extra={"scheduler": scheduler}
    )


@kind(SCHEDULER, options=("list", "dict"))
def several_schedulers(run: Run) -> Any:
    """Two optimizers with a scheduler each."""
    model = net()
    optimizers = [sgd(model[0]), adamw(model[2])]
    schedulers = [lrs.StepLR(optimizers[0], 2, 0.5), lrs.ExponentialLR(optimizers[1], 0.8)]

    def update(step: int) -> None:
        for each, scheduler in zip(optimizers, schedulers, strict=True):
            each.step()
            scheduler.step()

    given: Any = schedulers if run.option == "list" else dict(zip("ab", schedulers, strict=True))
    return loop(run, model, optimizers, update=update, extra={"schedulers": given})


class Cosine:
    """A scheduler of the script's own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.last = optimizer, 0

    def step(self) -> None:
        self.last += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(self.last / 3))

    def state_dict(self) -> Any:
        return {"last": self.last}

    def load_state_dict(self, state: Any) -> None:
        self.last = state["last"]


class Bare(Cosine):
    """The same, without a state_dict()."""

    state_dict = load_state_dict = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@kind(SCHEDULER)
def own_scheduler(run: Run) -> Any:
    model = net()
    optimizer = sgd(model)
    scheduler = Cosine(optimizer)
    return loop(
        run, model, optimizer, after=lambda _: scheduler.step(), extra={"scheduler": scheduler}
    )


@kind(SCHEDULER, also=("refused", "warned"))
def scheduler_without_state_dict(run: Run) -> Any:
    """An object that cannot tell its state, in extra."""
    model = net()
    optimizer = sgd(model)
    scheduler = Bare(optimizer)
    return loop(
        run, model, optimizer, after=lambda _: scheduler.step(), extra={"scheduler": scheduler}
    )


@kind(SCHEDULER + r"|extra\.", options=("object", "dict in place"))
def early_stopping(run: Run) -> Any:
    """Best loss and patience; the learning rate drops when the patience is over."""
    model = net()
    optimizer = sgd(model, lr=0.5)
    state = {"best": math.inf, "bad": 0, "drops": 0}

    class Stopper:
        def state_dict(self) -> Any:
            return dict(state)

        def load_state_dict(self, found: Any) -> None:
            state.update(found)

    def after(step: int) -> None:
        loss = float(mse(model, x(99)))
        better = loss < state["best"] - 0.02
        state.update(best=min(loss, state["best"]), bad=0 if better else state["bad"] + 1)
        if state["bad"] >= 2:
            optimizer.param_groups[0]["lr"] *= 0.5
            state.update(bad=0, drops=state["drops"] + 1)

    given: Any = Stopper() if run.option == "object" else state
    return loop(run, model, optimizer, after=after, extra={"stop": given}, also=lambda: state)


@kind(SCHEDULER + r"|optimizer")
def weight_decay_schedule(run: Run) -> Any:
    """Weight decay and momentum change with the step, relative to the last."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)

    def before(step: int) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] *= 1.1
            group["betas"] = (group["betas"][0] * 0.99, group["betas"][1])

    return loop(run, model, optimizer, before=before)


@kind(SCHEDULER, kills=(4, 5, 6))
def scheduler_replaced(run: Run) -> Any:
    """A second phase with another scheduler begins at step 4, which the script derives."""
    model = net()
    optimizer = sgd(model)
    phases = {"a": lrs.LinearLR(optimizer, 0.1, 1, 4), "b": lrs.ExponentialLR(optimizer, 0.8)}
    return loop(
        run, model, optimizer, extra={"schedulers": phases},
        after=lambda step: phases["a" if step < 4 else "b"].step(),
    )  # fmt: skip


@kind(SCHEDULER, hazard=True, also=("warned",), kills=(4, 8), steps=13)
def stepped_by_epochs(run: Run) -> Any:
    """scheduler.step() once an epoch of 4 steps, after the epoch's last save()."""
    model = net()
    optimizer = sgd(model)
    scheduler = lrs.StepLR(optimizer, 1, 0.5)

    def late(step: int) -> None:
        if step % 4 == 3:
            scheduler.step()

    return loop(run, model, optimizer, late=late, extra={"scheduler": scheduler})


@kind(
    SCHEDULER, options=("each step", "each epoch", "after the backward pass"), variants=6,
    kills=(2, 4, 5, 8), steps=13,
)  # fmt: skip
def stepped_first(run: Run) -> Any:
    """scheduler.step() before the optimizer's step: a resume does it again."""
    model = net()
    optimizer = sgd(model)
    scheduler = lrs.StepLR(optimizer, 1, 0.7)

    def before(step: int) -> None:
        if run.option == "each step" or (run.option == "each epoch" and step % 4 == 0):
            scheduler.step()

    def update(step: int) -> None:
        if run.option == "after the backward pass":
            scheduler.step()
        optimizer.step()

    extra = {"scheduler": scheduler}
    return loop(run, model, optimizer, before=before, update=update, extra=extra)


class Trainer:
    """Holds what it trains, with a state_dict() of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.epoch = optimizer, 0
        self.scheduler = lrs.SequentialLR(
            optimizer, [lrs.LinearLR(optimizer, 0.1, 1, 2), lrs.ExponentialLR(optimizer, 0.5)], [2]
        )

    def end_epoch(self) -> None:
        self.epoch += 1
        self.scheduler.step()

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, found: Any) -> None:
        self.epoch = found["epoch"]
        self.scheduler.load_state_dict(found["scheduler"])


@kind(SCHEDULER + r"|extra\.trainer", hazard=True, also=("warned",), kills=(5, 10), steps=16)
def trainer_ends_its_epoch_late(run: Run) -> Any:
    """A trainer with a scheduler ends its epoch of 5 steps after the epoch's last save()."""
    model = net()
    optimizer = sgd(model)
    trainer = Trainer(optimizer)
    return loop(
        run, model, optimizer, extra={"trainer": trainer},
        late=lambda step: trainer.end_epoch() if step % 5 == 4 else None,
    )  # fmt: skip


@kind(r"param_groups|schedul", options=("warm-up", "drops"), variants=6, kills=(4, 5, 6, 7))
def rate_from_the_step(run: Run) -> Any:
    """The rate is set from the step before each step: warm-up that ends, or drops at some steps."""
    model = net()
    optimizer = sgd(model)

    def before(step: int) -> None:
        if run.option == "warm-up":
            optimizer.param_groups[0]["lr"] = 0.2 * min(1.0, (step + 1) / 5)
        elif step in (4, 6):
            optimizer.param_groups[0]["lr"] *= 0.5

    return loop(run, model, optimizer, before=before)
