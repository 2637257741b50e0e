"""Optimizers: torch's, and those that users bring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bench.checkpoint.battery.frame import (
    BATCH,
    WIDTH,
    Run,
    adamw,
    digest,
    kind,
    loop,
    mse,
    net,
    sgd,
    x,
)

OPTIMIZER = r"(?i)\boptim"

TORCH: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


@kind(OPTIMIZER, options=tuple(TORCH))
def torch_optimizer(run: Run) -> Any:
    """Each of torch's."""
    model = net()
    return loop(run, model, TORCH[run.option](model.parameters()))


@kind(OPTIMIZER)
def lbfgs(run: Run) -> Any:
    """A closure, and a state of lists of tensors, under the first parameter."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3, history_size=4)

    def update(step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = mse(model, x(step))
            loss.backward()
            return loss

        optimizer.step(closure)

    return loop(run, model, optimizer, update=update)


@kind(OPTIMIZER)
def sparse_adam(run: Run) -> Any:
    """Sparse gradients of an embedding beside a dense head."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"table": nn.Embedding(20, WIDTH, sparse=True), "head": nn.Linear(16, 16)}
    )
    optimizers = [
        torch.optim.SparseAdam(model["table"].parameters(), lr=0.01),
        adamw(model["head"]),
    ]
    ckpt = run.checkpointer(model=model, optimizer=optimizers)
    for step in range(ckpt.resume(), run.steps):
        rows = torch.randint(20, (BATCH,), generator=torch.Generator().manual_seed(step))
        model["head"](model["table"](rows)).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
        ckpt.save(step + 1)
    found = digest(model.state_dict())
    ckpt.close()
    return found


class Muon(Optimizer):
    """Momentum, orthogonalised; AdamW-like for what is no matrix."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "muon": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                if p.ndim == 2 and group["muon"]:
                    g = buffer / (buffer.norm() + 1e-7)
                    for _ in range(3):
                        a = g @ g.mT
                        g = 3.4445 * g + (-4.775 * a + 2.0315 * a @ a) @ g
                    p.add_(g, alpha=-group["lr"])
                else:
                    square = state.setdefault("square", torch.zeros_like(p))
                    square.lerp_(p.grad.square(), 0.1)
                    p.addcdiv_(buffer, square.sqrt() + 1e-8, value=-group["lr"])


def matrices(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups: matrices, and all else."""
    return [
        {"params": [p for p in model.parameters() if (p.ndim == 2) == flat], "muon": flat}
        for flat in (True, False)
    ]


@kind(OPTIMIZER, options=("one", "list", "dict"))
def muon(run: Run) -> Any:
    """Muon alone with two groups, or beside AdamW in a list or a dict of optimizers."""
    model = net()
    if run.option == "one":
        return loop(run, model, Muon(matrices(model)))
    two, rest = (each["params"] for each in matrices(model))
    parts = {"muon": Muon(two), "adam": torch.optim.AdamW(rest, lr=0.01)}
    given = parts if run.option == "dict" else list(parts.values())
    return loop(run, model, given, update=lambda _: [each.step() for each in parts.values()])


class Lookahead(Optimizer):
    """The usual wrapper: slow weights and a count of its own."""

    def __init__(self, optimizer: Any, k: int = 3, alpha: float = 0.5, *, init: bool) -> None:
        if init:
            super().__init__(optimizer.param_groups, {})
        self.optimizer, self.k, self.alpha, self.n = optimizer, k, alpha, 0
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.n += 1
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.clone())
            if self.n % self.k == 0:
                slow.lerp_(p, self.alpha)
                p.copy_(slow)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        slow = [each["slow"] for each in self.state.values()]
        return {"fast": self.optimizer.state_dict(), "n": self.n, "slow": slow}

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict["fast"])
        self.n = state_dict["n"]
        for p, slow in zip(self.param_groups[0]["params"], state_dict["slow"], strict=False):
            self.state[p]["slow"] = slow.clone()


@kind(OPTIMIZER, options=("torch's __init__ not called", "called"), variants=4, also=("refused",))
def lookahead(run: Run) -> Any:
    """A wrapper with slow weights."""
    model = net()
    inner = sgd(model, lr=0.3)
    return loop(run, model, Lookahead(inner, init=run.option == "called"))


class Sam(Optimizer):
    """davda54/sam: the moments are in another optimizer, and in no state_dict()."""

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **settings: Any) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.detach().clone()
                p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old_p"])
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.enable_grad():
            self.first_step()
            closure()
            self.second_step()


@kind(OPTIMIZER, options=("sgd", "adamw"), also=("refused",))
def sam(run: Run) -> Any:
    """Two forward passes a step, and a base optimizer."""
    model = net()
    base: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[run.option]
    more = {"momentum": 0.9} if run.option == "sgd" else {}
    optimizer = Sam(model.parameters(), base, lr=0.05, **more)
    return loop(
        run, model, optimizer,
        update=lambda step: optimizer.step(lambda: mse(model, x(step)).backward()),
    )  # fmt: skip


class ScheduleFree(Optimizer):
    """Averages in place of a schedule: the parameters are another point in eval mode."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(
            params, {"lr": lr, "k": 0, "weight_sum": 0.0, "train_mode": True, "beta": 0.9}
        )

    @torch.no_grad()
    def swap(self, train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train:
                group["train_mode"] = train
                to = 1 - group["beta"] if train else 1 - 1 / group["beta"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], to)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            weight = group["lr"] ** 2 * group["k"]
            group["weight_sum"] += weight
            c = weight / group["weight_sum"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@kind(OPTIMIZER, options=("train", "eval before save"), variants=4)
def schedule_free(run: Run) -> Any:
    """Swaps to eval mode around an evaluation at steps 3 and 6."""
    model = net()
    optimizer = ScheduleFree(model.parameters())

    def evaluate(step: int) -> None:
        if step in (3, 6) and run.option != "train":
            optimizer.swap(False)

    return loop(run, model, optimizer, before=lambda _: optimizer.swap(True), after=evaluate)


@kind(OPTIMIZER + r"|model\.", hazard=True, also=("warned",))
def schedule_free_after_save(run: Run) -> Any:
    """Swaps there and back between save() and the next step, which rounds the weights."""
    model = net()
    optimizer = ScheduleFree(model.parameters())

    def evaluate(step: int) -> None:
        if step in (3, 6):
            optimizer.swap(False)

    return loop(run, model, optimizer, before=lambda _: optimizer.swap(True), late=evaluate)


@kind(OPTIMIZER)
def in_backward(run: Run) -> Any:
    """One optimizer a parameter, which steps while the backward pass goes on."""
    model = net()
    each = {n: torch.optim.AdamW([p], lr=0.01) for n, p in model.named_parameters()}
    names = {p: n for n, p in model.named_parameters()}

    def hook(p: torch.Tensor) -> None:
        each[names[p]].step()
        each[names[p]].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    return loop(run, model, each, update=lambda _: None)


class GaLore(Optimizer):
    """Moments in a low-rank space; the projection is made anew every few steps."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "rank": 4, "gap": 4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad
                state["step"] = state.get("step", 0) + 1
                if p.ndim == 2:
                    if state["step"] % group["gap"] == 1:
                        state["projector"] = torch.linalg.qr(grad)[0][:, : group["rank"]]
                    grad = state["projector"].mT @ grad
                average = state.setdefault("exp_avg", torch.zeros_like(grad))
                average.lerp_(grad, 0.1)
                full = state["projector"] @ average if p.ndim == 2 else average
                p.add_(full, alpha=-group["lr"])


@kind(OPTIMIZER)
def galore(run: Run) -> Any:
    model = net()
    return loop(run, model, GaLore(model.parameters()))


class EightBit(Optimizer):
    """Momentum in blocks of 8 bits with a scale each, as bitsandbytes keeps it."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["quantised"] = torch.full_like(p, 128, dtype=torch.uint8)
                    state["absmax"] = torch.ones(p.shape[0])
                    state["step"] = 0
                state["step"] += 1
                scale = state["absmax"].view(-1, *[1] * (p.ndim - 1)) / 127
                average = (state["quantised"].float() - 128) * scale * 0.9 + p.grad
                most = average.abs().reshape(p.shape[0], -1).amax(1) + 1e-12
                state["absmax"] = most
                back = average / most.view(-1, *[1] * (p.ndim - 1)) * 127 + 128
                state["quantised"].copy_(back.round().to(torch.uint8))
                p.sub_(average, alpha=group["lr"])


@kind(OPTIMIZER)
def eight_bit(run: Run) -> Any:
    model = net()
    return loop(run, model, EightBit(model.parameters()))


class Masters(Optimizer):
    """bf16 parameters, 32-bit master weights and moments in its state."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["step"] = torch.zeros(())
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad.float(), 0.1)
                state["master"].sub_(state["exp_avg"], alpha=group["lr"])
                p.copy_(state["master"])


class OwnLoad(Masters):
    """The same, with a load_state_dict() that undoes torch's cast to the parameter's dtype."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for found, p in zip(
            state_dict["state"].values(), self.param_groups[0]["params"], strict=False
        ):
            for name, value in found.items():
                self.state[p][name] = value.clone()


def half(model: nn.Module) -> nn.Module:
    return model.to(torch.bfloat16)


def half_mse(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return mse(model, batch.bfloat16())


@kind(OPTIMIZER, options=("in its state", "own load", "its parameters"))
def master_weights(run: Run) -> Any:
    """32-bit masters of bf16 parameters: in the state, or as the optimizer's own parameters."""
    model = half(net())
    if run.option != "its parameters":
        made = Masters if run.option == "in its state" else OwnLoad
        return loop(run, model, made(model.parameters()), loss=half_mse)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.01)

    def update(step: int) -> None:
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.float() if p.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)

    return loop(run, model, optimizer, loss=half_mse, update=update, also=lambda: masters)


class WithMore(torch.optim.SGD):
    """Keeps a count beside its state."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.n, self.norms = 0, [1.0]

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            group["lr"] = 0.5 / self.n
        self.norms.append(self.norms[-1] * 0.5)
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "n": self.n, "norms": list(self.norms)}

    def load_state_dict(self, state_dict: Any) -> None:
        self.n, self.norms = state_dict.get("n", 0), list(state_dict.get("norms", [1.0]))
        super().load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


@kind(OPTIMIZER, also=("refused",))
def more_in_its_state_dict(run: Run) -> Any:
    """Keys beside "state" and "param_groups"."""
    model = net()
    optimizer = WithMore(model.parameters(), lr=0.5)
    return loop(run, model, optimizer, also=lambda: optimizer.norms)


@kind(OPTIMIZER, also=("refused",))
def state_dict_hooks(run: Run) -> Any:
    """torch's own register_state_dict_post_hook and register_load_state_dict_pre_hook."""
    model, box = net(), {"scale": 1.0}
    optimizer = sgd(model)
    optimizer.register_state_dict_post_hook(lambda _, found: {**found, "box": dict(box)})

    def load(_: Any, found: Any) -> Any:
        box.update(found.get("box", {}))
        return {k: v for k, v in found.items() if k != "box"}

    optimizer.register_load_state_dict_pre_hook(load)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * box["scale"]
        box["scale"] *= 0.8

    return loop(run, model, optimizer, before=before)


class Prodigy(Optimizer):
    """Estimates its learning rate, with numbers in the group and tensors in its own attributes."""

    def __init__(self, params: Any, kept: str) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1e-2, "k": 0})
        self.kept, self.numerator = kept, torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = sum(float(p.grad.square().sum()) for p in group["params"])
            if self.kept == "attribute":
                self.numerator = self.numerator * 0.9 + total
                group["d"] = float(self.numerator) * 0.05
            else:
                group["numerator"] = group.get("numerator", 0.0) * 0.9 + total
                group["d"] = group["numerator"] * 0.05
            group["k"] += 1
            for p in group["params"]:
                first = self.state[p].setdefault("p0", p.detach().clone())
                p.sub_(p.grad + 0.01 * (p - first), alpha=group["d"])


@kind(OPTIMIZER, options=("group",))
def learning_rate_free(run: Run) -> Any:
    """Numbers that the optimizer keeps in its group."""
    model = net()
    return loop(run, model, Prodigy(model.parameters(), run.option))


@kind(OPTIMIZER, also=("warned", "refused"), unseeable=r"attribute.*optimi|optimi.*attribute")
def attribute_of_an_optimizer(run: Run) -> Any:
    """A tensor that is an attribute of the optimizer, and in no state_dict()."""
    model = net()
    return loop(run, model, Prodigy(model.parameters(), "attribute"))


class Odd(Optimizer):
    """State of all types: nested lists, None, a bool, tuples, and keys that are no parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "betas": (0.9, 0.99), "name": "odd", "off": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        total = self.state["total"]
        total["step"] = total.get("step", 0) + 1
        total["norm"] = total.get("norm", torch.zeros(())) * 0.5 + 0.5
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state |= {"factors": [p.clone(), {"left": torch.zeros(p.shape)}], "frozen": False}
                state |= {"inverse": None, "window": (0.0, 1)}
            state["factors"][0].lerp_(p, 0.1)
            state["factors"][1]["left"].add_(p.grad)
            state["window"] = (state["window"][0] + 0.1, total["step"])
            state["inverse"] = None if total["step"] % 2 else state["factors"][1]["left"] * 0.1
            by = state["inverse"] if state["inverse"] is not None else p.grad
            p.sub_(by * total["norm"], alpha=self.param_groups[0]["lr"] + state["window"][0] * 0.01)


@kind(OPTIMIZER, also=("refused",))
def odd_state(run: Run) -> Any:
    """As Shampoo and others keep it."""
    model = net()
    return loop(run, model, Odd(model.parameters()))


@kind(
    OPTIMIZER,
    options=("before save", "after save"),
    hazard=True,
    also=("warned",),
    variants=4,
    kills=(4, 5),
)
def state_clear(run: Run) -> Any:
    """ReLoRA and others drop the moments in mid-run: state.clear() at step 4."""
    model = net()
    optimizer = adamw(model)
    clear = lambda step: optimizer.state.clear() if step == 3 else None  # noqa: E731
    return loop(
        run, model, optimizer, **{"after" if run.option == "before save" else "late": clear}
    )


@kind(OPTIMIZER, hazard=True, also=("warned",), options=("lr", "momentum"), variants=4)
def group_changed_after_save(run: Run) -> Any:
    """param_groups are changed after save()."""
    model = net()
    optimizer = sgd(model, lr=0.3)

    def late(step: int) -> None:
        optimizer.param_groups[0][run.option] *= 0.8

    return loop(run, model, optimizer, late=late)


@kind(OPTIMIZER)
def lr_of_the_script(run: Run) -> Any:
    """The script sets the learning rate at the begin of each step, and warms up."""
    model = net()
    optimizer = adamw(model)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * min(1, (step + 1) / 5)

    return loop(run, model, optimizer, before=before)


@kind(OPTIMIZER + "|group|frozen|model", also=("warned", "refused"), kills=(5, 6, 7))
def group_added(run: Run) -> Any:
    """A layer is unfrozen at step 3 and gets a parameter group; not again after a resume."""
    model = net()
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)

    def before(step: int) -> None:
        if step == 3:
            model[2].requires_grad_(True)
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})

    return loop(run, model, optimizer, before=before)


class Accelerated(Optimizer):
    """accelerate's wrapper: Optimizer.__init__ never runs, all is the inner one's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


@kind(OPTIMIZER, also=("refused",))
def thin_wrapper(run: Run) -> Any:
    """A wrapper without state, as accelerate's."""
    model = net()
    return loop(run, model, Accelerated(adamw(model)))


@kind(OPTIMIZER)
def half_moments(run: Run) -> Any:
    """bf16 moments of 32-bit parameters."""

    class Half(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.bfloat16))
                m.mul_(0.9).add_(p.grad)
                p.sub_(m, alpha=0.1)

    model = net()
    return loop(run, model, Half(model.parameters(), lr=0.1))


@kind(OPTIMIZER + "|extra", also=("warned",), unseeable=r"local|closure|hook")
def step_hook_with_count(run: Run) -> Any:
    """A step hook counts in a closure, and decays the learning rate by it: nobody hands it over."""
    model, count = net(), [0]
    optimizer = sgd(model, lr=0.3)

    def hook(*_: Any) -> None:
        count[0] += 1
        if count[0] % 3 == 0:
            for p in model.parameters():
                p.grad.mul_(0.1)  # type: ignore[union-attr]

    optimizer.register_step_pre_hook(hook)
    return loop(run, model, optimizer)


class Plain:
    """No torch optimizer at all, but with a state_dict()."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.momentum = [torch.zeros_like(p) for p in self.params]
        self.n = 0

    @torch.no_grad()
    def step(self) -> None:
        self.n += 1
        for p, m in zip(self.params, self.momentum, strict=True):
            m.mul_(0.9).add_(p.grad)
            p.sub_(m, alpha=0.1 / self.n)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]
        for m, saved in zip(self.momentum, state["momentum"], strict=True):
            m.copy_(saved)


@kind(OPTIMIZER, options=("optimizer", "extra"))
def own_class(run: Run) -> Any:
    """An optimizer that is none of torch's classes."""
    model = net()
    optimizer = Plain(model.parameters())
    hand = {"optimizer": None, "extra": {"opt": optimizer}} if run.option == "extra" else {}
    return loop(run, model, optimizer, hand=hand)


@kind(OPTIMIZER)
def functional(run: Run) -> Any:
    """torch.func: parameters and moments in plain dicts of tensors, in extra."""
    model = net()
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    moments = {n: torch.zeros_like(p) for n, p in params.items()}
    ckpt = run.checkpointer(extra={"params": params, "moments": moments})
    for step in range(ckpt.resume(), run.steps):
        batch = x(step)
        f = lambda p, b=batch: (torch.func.functional_call(model, p, b) - b).square().mean()  # noqa: E731
        for n, grad in torch.func.grad(f)(params).items():
            moments[n].mul_(0.9).add_(grad)
            params[n].sub_(moments[n], alpha=0.1)
        ckpt.save(step + 1)
    found = digest([params, moments])
    ckpt.close()
    return found
