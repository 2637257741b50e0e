"""Models: shared and frozen weights, buffers, modes, structure that changes, odd tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from bench.checkpoint.battery.frame import (
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
)  # fmt: skip

MODEL = r"(?i)\bmodel\b"


class Tied(nn.Module):
    """An embedding whose weight is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight

    def forward(self, batch: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.embed(batch)))


@kind(MODEL, options=("parameter", "module"))
def tied(run: Run) -> Any:
    """A weight with two names, or a module with two."""
    if run.option == "parameter":
        model: Any = Tied()
    else:
        layer = net()
        model = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(WIDTH, WIDTH)})
        model.forward = lambda batch: model["c"](model["b"](model["a"](batch)))
    return loop(run, model, adamw(model))


@kind(MODEL)
def frozen(run: Run) -> Any:
    """A frozen base, trained head."""
    model = net()
    model[0].requires_grad_(False)
    return loop(run, model, adamw(model[2]))


@kind(MODEL + "|froze|frozen|requires_grad", also=("warned",), kills=(5, 6, 7))
def unfrozen(run: Run) -> Any:
    """A layer is unfrozen at step 3, once; the optimizer had it from the start."""
    model = net()
    model[0].requires_grad_(False)

    def before(step: int) -> None:
        if step == 3:
            model[0].requires_grad_(True)

    return loop(run, model, sgd(model), before=before)


@kind(MODEL, options=("from the step",), kills=(5, 6, 7))
def progressive(run: Run) -> Any:
    """Layers are unfrozen by a rule of the step."""
    model = net()
    model[0].requires_grad_(False)
    return loop(run, model, sgd(model), before=lambda s: model[0].requires_grad_(s >= 3))


NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(WIDTH),
    "cumulative": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten()
    ),
    "dropout": lambda: nn.Dropout(0.3),
}


@kind(MODEL, options=tuple(NORMS))
def normalised(run: Run) -> Any:
    """Running statistics, power iterations, parametrizations."""
    model = net()
    model.insert(1, NORMS[run.option]())
    return loop(run, model, sgd(model))


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


@kind(MODEL)
def parametrized(run: Run) -> Any:
    """A parametrization of the script's own."""
    model = net()
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    return loop(run, model, adamw(model))


class Codebook(nn.Module):
    """Vector quantisation: the codes are buffers that the forward pass updates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encode = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        z = self.encode(batch)
        nearest = torch.cdist(z, self.codes).argmin(1)
        with torch.no_grad():
            one_hot = nn.functional.one_hot(nearest, 6).float()
            self.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            sums = one_hot.T @ z
            self.codes.lerp_(sums / self.counts.unsqueeze(1), 0.1)
        return z + (self.codes[nearest] - z).detach()


class Reassigned(Codebook):
    """The same, but the buffers are new tensors each time, and written through ``.data``."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        z = self.encode(batch)
        nearest = torch.cdist(z, self.codes).argmin(1)
        one_hot = nn.functional.one_hot(nearest, 6).float()
        self.counts = self.counts * 0.9 + one_hot.sum(0) * 0.1
        self.codes.data.copy_(0.9 * self.codes + 0.1 * (one_hot.T @ z).detach())
        return z + (self.codes[nearest] - z).detach()


@kind(MODEL, options=("in place", "reassigned"), variants=4)
def codebook(run: Run) -> Any:
    model = Codebook() if run.option == "in place" else Reassigned()
    return loop(run, model, adamw(model))


class Hidden(nn.Module):
    """State beside the parameters, that torch's state_dict() leaves out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.how = net(), how
        if how == "buffer":
            self.register_buffer("scale", torch.ones(()), persistent=False)
        elif how == "constant buffer":
            self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril()[7], persistent=False)
        else:
            self.scale: Any = torch.ones(()) if how == "tensor" else 1.0

    def forward(self, batch: torch.Tensor) -> Any:
        if self.how == "constant buffer":
            return self.body(batch) * self.mask
        self.scale = self.scale * 0.8 + 0.1
        return self.body(batch) * self.scale


@kind(
    MODEL, options=("buffer", "tensor", "number"), variants=3, also=("warned",),
    unseeable=r"persistent|attribute",
)  # fmt: skip
def hidden_state(run: Run) -> Any:
    """A buffer that is not persistent, or an attribute, changes at each step."""
    model = Hidden(run.option)
    return loop(run, model, sgd(model))


@kind(MODEL)
def constant_buffer(run: Run) -> Any:
    """A buffer that is not persistent and never changes, as a causal mask or RoPE's."""
    model = Hidden("constant buffer")
    return loop(run, model, sgd(model))


class Counting(nn.Linear):
    """Keeps a count with get_extra_state()."""

    def __init__(self, tensor: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.n, self.tensor = 0, tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return super().forward(batch) / self.n

    def get_extra_state(self) -> Any:
        return {"n": torch.tensor(self.n) if self.tensor else self.n}

    def set_extra_state(self, state: Any) -> None:
        self.n = int(state["n"])


@kind(MODEL, options=("number", "tensor"))
def extra_state(run: Run) -> Any:
    """As TransformerEngine keeps its scales."""
    model = net()
    model.append(Counting(run.option == "tensor"))
    return loop(run, model, sgd(model))


class Lora(nn.Module):
    """A frozen base and low-rank matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, batch: torch.Tensor) -> Any:
        return self.base(batch) + batch @ self.a.T @ self.b.T


@kind(MODEL, options=("adapters in the optimizer", "merged at step 4"), kills=(5, 6, 7))
def lora(run: Run) -> Any:
    """LoRA; or ReLoRA, which merges the adapters into the base now and then."""
    model = net()
    model[0], model[2] = Lora(model[0]), Lora(model[2])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)

    @torch.no_grad()
    def after(step: int) -> None:
        if step == 3 and run.option.startswith("merged"):
            for each in (model[0], model[2]):
                each.base.weight.add_(each.b @ each.a)
                each.b.zero_()

    return loop(run, model, optimizer, after=after)


@kind(MODEL, options=("ModuleDict", "dict of models"))
def mixture_of_experts(run: Run) -> Any:
    """A router and experts; in a plain dict they are given as models of their own."""
    router, experts = nn.Linear(WIDTH, 3), {f"e{i}": net(i) for i in range(3)}

    def forward(batch: torch.Tensor) -> torch.Tensor:
        weights = router(batch).softmax(-1)
        outs = torch.stack([e(batch) for e in experts.values()], -1)
        return (outs * weights.unsqueeze(1)).sum(-1)

    model: Any = nn.ModuleDict({"router": router, "experts": nn.ModuleDict(experts)})
    hand = {"model": {"router": router, **experts}} if run.option != "ModuleDict" else {}
    return loop(run, model, adamw(model), forward=forward, hand=hand)


@kind(MODEL + r"|optimizer", also=("warned", "refused"), unseeable=r"dict|registered")
def experts_not_registered(run: Run) -> Any:
    """Experts in a plain dict attribute: no parameters of the model, but of the optimizer."""
    model: Any = net()
    model.experts = {i: net(i + 1) for i in range(2)}
    parameters = [p for e in (model, *model.experts.values()) for p in e.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    forward = lambda batch: model(batch) + sum(e(batch) for e in model.experts.values())  # noqa: E731
    return loop(
        run, model, optimizer, forward=forward,
        also=lambda: [e.state_dict() for e in model.experts.values()],
    )  # fmt: skip


class Quantised(nn.Module):
    """int8 weights and scales as buffers, a trained bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.register_buffer("weight", torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8))
        self.register_buffer("scale", torch.full((WIDTH, 1), 0.01))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.99)
        return batch @ (self.weight * self.scale).T + self.bias


@kind(MODEL, options=("int8 buffers", "quantised tensor"), also=("refused",))
def quantised(run: Run) -> Any:
    model: Any = net()
    model.append(Quantised())
    if run.option == "quantised tensor":
        model.register_buffer(
            "packed", torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)
        )
        ckpt = run.checkpointer(model=model)
        ckpt.resume()
    return loop(run, model, sgd(model))


@kind(MODEL, options=("module", "step"))
def compiled(run: Run) -> Any:
    """torch.compile of the model, or of the whole step."""
    model = net()
    optimizer = adamw(model)
    if run.option == "module":
        compiled: Any = torch.compile(model, backend="aot_eager")
        return loop(run, compiled, optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    return loop(run, model, optimizer, update=lambda _: step())


@kind(r"(?i)model|mode|eval", also=("warned",), kills=(5, 6, 7), unseeable=r"eval|mode")
def eval_mid_run(run: Run) -> Any:
    """bn.eval() at step 3, once: frozen statistics from then on."""
    model = net()
    model.insert(1, nn.BatchNorm1d(WIDTH))

    def before(step: int) -> None:
        if step == 3:
            model[1].eval()

    return loop(run, model, sgd(model), before=before)


@kind(r"(?i)model|mode|eval")
def evaluates(run: Run) -> Any:
    """eval() for an evaluation before save(), train() at the begin of each step."""
    model = net()
    model.insert(1, nn.BatchNorm1d(WIDTH))
    model.insert(2, nn.Dropout(0.2))

    @torch.no_grad()
    def after(step: int) -> None:
        model.eval()
        model(x(99))

    return loop(run, model, sgd(model), before=lambda _: model.train(), after=after)


class Scaled(torch.Tensor):
    """A tensor with an attribute, as some FP8 recipes have it."""

    scale: float


@kind(MODEL, also=("warned", "refused"), unseeable=r"attribute|subclass")
def tensor_subclass(run: Run) -> Any:
    """A parameter of a subclass of Tensor, whose attribute changes."""
    model = net()
    weight = torch.Tensor._make_subclass(Scaled, torch.ones(WIDTH))
    weight.scale = 1.0
    model.register_parameter("gain", nn.Parameter(weight))
    model.gain.scale = 1.0

    def forward(batch: torch.Tensor) -> torch.Tensor:
        return model(batch) * model.gain.as_subclass(torch.Tensor) * model.gain.scale

    def before(step: int) -> None:
        model.gain.scale *= 0.9

    return loop(
        run, model, sgd(model), forward=forward, before=before, also=lambda: model.gain.scale
    )


DTYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64,
    "complex64": torch.complex64, "float8": torch.float8_e4m3fn,
}  # fmt: skip


@kind(MODEL, options=tuple(DTYPES))
def dtypes(run: Run) -> Any:
    """A model of another type, or with a buffer of it."""
    dtype = DTYPES[run.option]
    model = net()
    if dtype.is_complex or dtype.itemsize == 1:
        model.register_buffer("table", torch.zeros(WIDTH).to(dtype))

        def before(step: int) -> None:
            model.table.copy_(torch.full((WIDTH,), float(step)))

        loss = lambda m, b: mse(m, b + m.table.to(torch.complex64).real)  # noqa: E731
        return loop(run, model, sgd(model), before=before, loss=loss)
    return loop(run, model.to(dtype), sgd(model), loss=lambda m, b: mse(m, b.to(dtype)))


@kind(MODEL)
def complex_parameters(run: Run) -> Any:
    """Complex weights, as in spectral layers."""
    model: Any = net()
    model.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=torch.complex64))
    forward = lambda b: model[2](torch.fft.irfft(torch.fft.rfft(model[0](b)) * model.filter))  # noqa: E731
    optimizer = torch.optim.Adam([*model[0].parameters(), *model[2].parameters(), model.filter])
    return loop(run, model, optimizer, forward=forward)


@kind(MODEL)
def flat_parameters(run: Run) -> Any:
    """All parameters are views of one buffer."""
    model = net()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return loop(run, model, sgd(model), also=lambda: flat)


@kind(MODEL, kills=(5, 6, 7))
def pruned(run: Run) -> Any:
    """Magnitude pruning by masks, more of it at each step."""
    model: Any = net()
    prune.identity(model[0], "weight")
    optimizer = sgd(model)

    @torch.no_grad()
    def after(step: int) -> None:
        small = model[0].weight_orig.abs() < 0.01 * step
        model[0].weight_mask[small] = 0

    return loop(run, model, optimizer, after=after)


@kind(MODEL, options=("lstm", "attention", "conv channels_last", "lazy", "embedding bag"))
def layers(run: Run) -> Any:
    """Layers with layouts of their own."""
    torch.manual_seed(0)
    if run.option == "lstm":
        core: Any = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        forward: Any = lambda b: core(b.unsqueeze(1))[0].squeeze(1)  # noqa: E731
    elif run.option == "attention":
        core = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True)
        forward = lambda b: core(b.unsqueeze(0)).squeeze(0)  # noqa: E731
    elif run.option == "conv channels_last":
        core = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        forward = lambda b: core(b.view(-1, 4, 2, 2)).reshape(-1, WIDTH)  # noqa: E731
    elif run.option == "lazy":
        core = nn.LazyLinear(WIDTH)
        core(x(0))
        forward = core
    else:
        core = nn.EmbeddingBag(30, WIDTH)
        forward = lambda b: core((b.abs() * 9).long().clamp(0, 29))  # noqa: E731
    return loop(run, core, adamw(core), forward=forward)


@kind(MODEL + "|layers?|parameter", also=("refused", "warned"), kills=(5, 6, 7))
def grown(run: Run) -> Any:
    """A layer is added in mid-run, which the resumed script has not done yet."""
    model = net()
    optimizer = sgd(model)

    def before(step: int) -> None:
        if step == 3:
            torch.manual_seed(9)
            model.append(nn.Linear(WIDTH, WIDTH))
            optimizer.add_param_group({"params": model[3].parameters()})

    return loop(run, model, optimizer, before=before)


@kind(MODEL, kills=(5, 6, 7))
def grown_again(run: Run) -> Any:
    """The same, but a resumed script adds the layer before resume()."""
    model = net()
    grown = run.mode == "resume"
    torch.manual_seed(9)
    more = nn.Linear(WIDTH, WIDTH)
    if grown:
        model.append(more)
    optimizer = sgd(model)

    def before(step: int) -> None:
        if step == 3 and len(model) == 3:
            model.append(more)
            optimizer.add_param_group({"params": more.parameters()})
            optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]

    return loop(run, model, optimizer, before=before)


@kind(MODEL)
def stacked(run: Run) -> Any:
    """An ensemble by torch.func.stack_module_state and vmap."""
    models = [net(i) for i in range(3)]
    params, _ = torch.func.stack_module_state(models)
    params = {n: p.detach().requires_grad_() for n, p in params.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=0.01)
    call = lambda p, b: torch.func.functional_call(models[0], (p, {}), (b,))  # noqa: E731
    ckpt = run.checkpointer(optimizer=optimizer, extra={"params": params})
    for step in range(ckpt.resume(), run.steps):
        batch = x(step)
        (torch.vmap(call, (0, None))(params, batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.save(step + 1)
    found = digest(params)
    ckpt.close()
    return found


@kind(MODEL + "|temperature|optimizer")
def parameter_without_model(run: Run) -> Any:
    """A learned temperature that the optimizer has and no model."""
    model = net()
    temperature = torch.ones((), requires_grad=True)
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=0.02)
    return loop(
        run, model, optimizer, forward=lambda b: model(b) * temperature, also=lambda: temperature
    )


@kind(MODEL)
def large(run: Run) -> Any:
    """A state of 5 MB, of which a step's comparison reads a part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 768), nn.Linear(768, 16))
    return loop(run, model, adamw(model))


@kind(MODEL, options=("list", "dict"))
def several_models(run: Run) -> Any:
    """An encoder and a decoder, as list or dict."""
    parts = {"encoder": net(0), "decoder": net(1)}
    model: Any = nn.ModuleDict(parts)
    given: Any = parts if run.option == "dict" else list(parts.values())
    forward = lambda b: parts["decoder"](parts["encoder"](b))  # noqa: E731
    optimizer = [adamw(each) for each in parts.values()]
    update = lambda _: [each.step() for each in optimizer]  # noqa: E731
    return loop(run, model, optimizer, forward=forward, update=update, hand={"model": given})


@kind(MODEL, also=("warned",), options=("clamp", "renormalise", "numpy", "copy_ of a reset"))
def written_outside(run: Run) -> Any:
    """Weights that the script itself writes, before save()."""
    model = net()

    def after(step: int) -> None:
        weight = model[0].weight
        if run.option == "clamp":
            weight.data.clamp_(-0.2, 0.2)
        elif run.option == "renormalise":
            weight.data = weight.data / weight.data.norm(dim=1, keepdim=True)
        elif run.option == "numpy":
            weight.detach().numpy()[...] *= 0.99
        elif step == 4:
            with torch.no_grad():
                model[2].weight.copy_(torch.eye(WIDTH))

    return loop(run, model, sgd(model), after=after)
