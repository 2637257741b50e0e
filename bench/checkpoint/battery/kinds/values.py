"""Values that scripts keep in ``extra``, or forget to: counters, histories, generators."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch

from bench.checkpoint.battery.frame import BATCH, WIDTH, Run, digest, kind, loop, mse, net, sgd, x

LOCAL = r"local variable|never (given|handed)|not (given|handed)|of the script"


def named(name: str) -> str:
    return rf"extra\.{name}\b|extra\[.?{name}\b|\b{name}\b"


def raised(best: Any, step: int) -> Any:
    """Another value of its type."""
    if isinstance(best, tuple):
        return best[0] + 1, step
    return f"{best}a" if isinstance(best, str) else (best or 0) + 1


@kind(named("best"), also=("warned",), options=("number", "text", "tuple", "None"))
def never_set_again(run: Run) -> Any:
    """extra={"best": best}, and best is a local variable from then on."""
    model = net()
    optimizer = sgd(model)
    best: Any = {"number": 0, "text": "", "tuple": (0, 0), "None": None}[run.option]
    ckpt = run.checkpointer(model=model, optimizer=optimizer, extra={"best": best})
    began = ckpt.resume()
    best = ckpt.extra["best"]
    for step in range(began, run.steps):
        mse(model, x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        best = raised(best, step)
        ckpt.save(step + 1)
    ckpt.close()
    return [list(model.parameters()), best]


@kind(
    named("ema") + "|" + named("history"), hazard=True, also=("warned",),
    options=("dict", "list", "tensor"),
)  # fmt: skip
def rebound(run: Run) -> Any:
    """A dict, a list or a tensor that is made anew each step; extra keeps the first."""
    model = net()
    optimizer = sgd(model)
    value: Any = [0.0] if run.option == "list" else torch.zeros(4)
    if run.option == "dict":
        value = {n: p.detach().clone() for n, p in model.named_parameters()}
    ckpt = run.checkpointer(model=model, optimizer=optimizer, extra={"ema": value})
    for step in range(ckpt.resume(), run.steps):
        mse(model, x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            if run.option == "dict":
                value = {n: 0.9 * value[n] + 0.1 * p for n, p in model.named_parameters()}
            elif run.option == "list":
                value = [*value, float(step)]
            else:
                value = value * 0.9 + step
        ckpt.save(step + 1)
    ckpt.close()
    return [list(model.parameters()), value]


@kind(named("tokens"))
def read_back(run: Run) -> Any:
    """A counter as the docs say: set before save(), read after resume()."""
    model = net()
    optimizer = sgd(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer, extra={"tokens": 0, "name": "a"})
    began = ckpt.resume()
    tokens, name = ckpt.extra["tokens"], ckpt.extra["name"]
    for step in range(began, run.steps):
        mse(model, x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += 128
        name = f"{name}{step}"[-6:]
        ckpt.extra["tokens"], ckpt.extra["name"] = tokens, name
        ckpt.save(step + 1)
    ckpt.close()
    return [list(model.parameters()), tokens, name]


@kind(named("tokens"), also=("warned",))
def not_read_back(run: Run) -> Any:
    """The counter is set, and not read after resume()."""
    model = net()
    optimizer = sgd(model)
    tokens = 0
    ckpt = run.checkpointer(model=model, optimizer=optimizer, extra={"tokens": 0})
    for step in range(ckpt.resume(), run.steps):
        mse(model, x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens += 128
        ckpt.extra["tokens"] = tokens
        ckpt.save(step + 1)
    ckpt.close()
    return [list(model.parameters()), tokens]


@kind(named("note"), also=("warned",))
def name_not_given(run: Run) -> Any:
    """ckpt.extra gets a name that was not in extra=."""
    model = net()
    optimizer = sgd(model)
    ckpt = run.checkpointer(model=model, optimizer=optimizer)
    began = ckpt.resume()
    note = ckpt.extra.get("note", 0)
    for step in range(began, run.steps):
        mse(model, x(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        note += 1
        ckpt.extra["note"] = note
        ckpt.save(step + 1)
    ckpt.close()
    return [list(model.parameters()), note]


@kind(named("config"))
def a_constant(run: Run) -> Any:
    """Settings that never change, kept to be looked up later: nothing to warn of."""
    config = {"lr": 0.1, "name": "run7", "layers": [1, 2], "on": True, "none": None}
    model = net()
    optimizer = sgd(model, lr=config["lr"])
    extra = {"config": dict(config), "version": 3, "seed": 7}
    return loop(run, model, optimizer, extra=extra)


@kind(named("kept"))
def containers_in_place(run: Run) -> Any:
    """Lists, dicts, deques, counters, sets and arrays that are changed in place."""
    model = net()
    optimizer = sgd(model)
    kept: dict[str, Any] = {
        "list": [], "dict": {}, "deque": deque(maxlen=3), "counter": Counter(), "set": set(),
        "default": defaultdict(list), "ordered": OrderedDict(), "array": np.zeros(4),
        "tensor": torch.zeros(3), "nested": [{"a": [torch.zeros(2)]}], "bytes": bytearray(4),
    }  # fmt: skip
    kept.pop("bytes")

    def after(step: int) -> None:
        kept["list"].append(step)
        kept["dict"][f"k{step}"] = step / 3
        kept["deque"].append(step)
        kept["counter"][step % 3] += 1
        kept["set"].add(step % 4)
        kept["default"][step % 2].append(step)
        kept["ordered"][step] = str(step)
        kept["array"] += step
        kept["tensor"].add_(step)
        kept["nested"][0]["a"][0].mul_(0.5).add_(step)

    return loop(run, model, optimizer, after=after, extra=kept, also=lambda: kept)


def generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(7),
        "numpy": np.random.default_rng(7),
        "numpy RandomState": np.random.RandomState(7),
        "numpy Philox": np.random.Generator(np.random.Philox(7)),
        "python": random.Random(7),
    }


def noise(generator: Any) -> torch.Tensor:
    if isinstance(generator, torch.Generator):
        return torch.randn(BATCH, WIDTH, generator=generator)
    if isinstance(generator, random.Random):
        return torch.tensor([generator.gauss(0, 1) for _ in range(WIDTH)])
    return torch.as_tensor(generator.standard_normal(WIDTH)).float()


@kind(named("noise"), options=tuple(generators()))
def own_generator(run: Run) -> Any:
    """A generator of the script's own, in extra."""
    model = net()
    generator = generators()[run.option]
    loss = lambda model, batch: mse(model, batch + noise(generator))  # noqa: E731
    return loop(run, model, sgd(model), loss=loss, extra={"noise": generator})


@kind(named("noise"), options=("python", "numpy", "torch"), variants=3)
def global_generators(run: Run) -> Any:
    """The generators of the process."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = net()
    draw = {
        "python": lambda: torch.tensor([random.gauss(0, 1) for _ in range(WIDTH)]),
        "numpy": lambda: torch.as_tensor(np.random.randn(WIDTH)).float(),
        "torch": lambda: torch.randn(WIDTH),
    }[run.option]
    return loop(run, model, sgd(model), loss=lambda m, batch: mse(m, batch + draw()))


@kind("generator", also=("warned",), unseeable=r"generator")
def generator_in_a_closure(run: Run) -> Any:
    """A generator that nobody hands over."""
    model = net()
    generator = np.random.default_rng(3)
    return loop(run, model, sgd(model), loss=lambda m, batch: mse(m, batch + noise(generator)))


@kind("local", also=("warned",), unseeable=r"variable")
def local_counter(run: Run) -> Any:
    """A count in a local variable decides on the learning rate."""
    model = net()
    optimizer = sgd(model)
    bad = 0

    def before(step: int) -> None:
        nonlocal bad
        bad += 1
        optimizer.param_groups[0]["lr"] = 0.2 / bad

    return loop(run, model, optimizer, before=before)


@kind(named("history"))
def clipping_history(run: Run) -> Any:
    """AutoClip: gradients are clipped at a percentile of their past norms."""
    model = net()
    optimizer = sgd(model, lr=0.5)
    history: list[float] = []

    def update(step: int) -> None:
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        history.append(float(total))
        bound = float(np.percentile(history, 30))
        torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()

    return loop(
        run, model, optimizer, update=update, extra={"history": history}, also=lambda: history
    )


@kind(named("cache"))
def activation_cache(run: Run) -> Any:
    """A cache of activations by sample, in a dict that grows, in extra."""
    model = net()
    cache: dict[int, torch.Tensor] = {}

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        at = int(batch[0, 0].abs() * 10) % 3
        old = cache.get(at, torch.zeros(()))
        cache[at] = out.mean().detach()
        result: torch.Tensor = (out - batch).square().mean() + (out.mean() - old).square()
        return result

    return loop(run, model, sgd(model), loss=loss, extra={"cache": cache}, also=lambda: cache)


@kind(named("args"))
def namespace(run: Run) -> Any:
    """vars(args), changed in place."""
    model = net()
    args = argparse.Namespace(lr=0.1, seen=0, tags=["a"])

    def after(step: int) -> None:
        args.seen += 1
        args.tags.append(str(step))

    return loop(run, model, sgd(model), after=after, extra={"args": vars(args)}, also=lambda: args)


@dataclasses.dataclass
class Progress:
    """A dataclass, as torchtitan and others keep it."""

    seen: int = 0
    when: str = ""


@kind(named("progress"), options=("dataclass", "datetime", "decimal", "bytes"), also=("refused",))
def refused_values(run: Run) -> Any:
    """Values that are neither tensors nor JSON."""
    import decimal

    model = net()
    value = {
        "dataclass": Progress(), "datetime": datetime.datetime(2026, 1, 1),
        "decimal": decimal.Decimal(1), "bytes": b"\x00\xff",
    }[run.option]  # fmt: skip
    return loop(run, model, sgd(model), extra={"progress": value})


@kind(named("progress"))
def object_with_state_dict(run: Run) -> Any:
    """torchtitan's TrainState: an object with a state_dict() of tensors."""
    model = net()

    class State:
        def __init__(self) -> None:
            self.step, self.losses = 0, [0.0]

        def state_dict(self) -> Any:
            return {"step": torch.tensor(self.step), "losses": torch.tensor(self.losses).double()}

        def load_state_dict(self, found: Any) -> None:
            self.step, self.losses = int(found["step"]), found["losses"].tolist()

    state = State()

    def after(step: int) -> None:
        state.step += 1
        state.losses.append(state.step / 4)

    return loop(
        run, model, sgd(model), after=after, extra={"progress": state},
        also=lambda: [state.step, state.losses],
    )  # fmt: skip


@kind(named("meter"), hazard=True, also=("warned",))
def changed_after_save(run: Run) -> Any:
    """A list in extra grows after save()."""
    model = net()
    meter: list[int] = []
    return loop(
        run, model, sgd(model), late=meter.append, extra={"meter": meter}, also=lambda: meter
    )


@kind("extra", options=("tensor", "numpy"))
def metrics_window(run: Run) -> Any:
    """A ring of losses as a tensor or an array with a cursor."""
    model = net()
    ring: Any = torch.zeros(4) if run.option == "tensor" else np.zeros(4)
    cursor = torch.zeros((), dtype=torch.long) if run.option == "tensor" else np.zeros(1, int)

    def after(step: int) -> None:
        ring[int(cursor.reshape(-1)[0]) % 4] = step
        cursor[...] = cursor + 1

    return loop(
        run, model, sgd(model), after=after, extra={"ring": ring, "cursor": cursor},
        also=lambda: [ring, cursor],
    )  # fmt: skip


@kind("random|generator|rng|rank")
def seeds_by_step(run: Run) -> Any:
    """Everything is seeded anew at each step: nothing is lost."""

    def before(step: int) -> None:
        torch.manual_seed(step)

    model = net()
    found = loop(
        run, model, sgd(model), before=before, loss=lambda m, b: mse(m, torch.randn_like(b))
    )
    return digest(found)
