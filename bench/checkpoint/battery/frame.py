"""The frame of all kinds: a run that may be disturbed, small models, one common loop."""

from __future__ import annotations

import json
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.checkpoint.battery.case import SAVED, Kind, Variant
from robust_slurm import Checkpointer

WRITE_DEADLINE = 30.0
"""s for a durable step to be committed before the crash."""
WIDTH, BATCH = 16, 8

Train = Callable[["Run"], Any]
KINDS: dict[str, tuple[Kind, Train]] = {}


def kind(thing: str, **settings: Any) -> Callable[[Train], Train]:
    """Declare a kind of loop; see Kind. The function is given a Run, and returns the last state."""

    def add(train: Train) -> Train:
        family = train.__module__.rpartition(".")[2]
        made = Kind(train.__name__, family, thing, **settings)
        if made.name in KINDS:
            raise ValueError(f"two kinds are named {made.name}")
        KINDS[made.name] = (made, train)
        return train

    return add


class RefusedError(Exception):
    """A Checkpointer raised when it was made or in resume()."""


class Run:
    """One run of a loop, on one rank: undisturbed, until its crash, or resumed."""

    def __init__(self, variant: Variant, mode: str, directory: Path, rank: int, world: int) -> None:
        """``mode``: "reference", "crash" or "resume"; ``directory``: of durable steps."""
        self.variant, self.mode, self.directory = variant, mode, directory
        self.rank, self.world, self.option = rank, world, variant.option
        self.steps = variant.kind.steps
        self.result: dict[str, Any] = {"began": 0}

    def checkpointer(self, **given: Any) -> Any:
        """A Checkpointer of these objects; in the reference a stand-in that saves nothing."""
        return Undisturbed(given) if self.mode == "reference" else Disturbed(self, given)

    def die(self) -> None:
        """Crash."""
        os.kill(os.getpid(), getattr(signal, self.variant.signal))
        time.sleep(20)  # a handler of SIGTERM may have work to do
        os._exit(97)


class Undisturbed:
    """Stands in for a Checkpointer in a run without one."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.extra = dict(given.get("extra") or {})

    def resume(self) -> int:
        return 0

    def save(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Disturbed:
    """A Checkpointer, and the crash at its moment."""

    def __init__(self, run: Run, given: dict[str, Any]) -> None:
        self._run, self._given, self._armed = run, given, False
        settings: dict[str, Any] = {}
        if run.variant.disk:
            settings["directory"] = run.directory
        if run.variant.disk == "every":
            settings |= {"every": 1, "keep": 99}
        self._ckpt = _refusing(lambda: Checkpointer(**{**settings, **given}))

    @property
    def extra(self) -> Any:
        return self._ckpt.extra

    def resume(self) -> int:
        step: int = _refusing(self._ckpt.resume)
        self._run.result["began"] = step
        if self._run.mode == "resume" and self._run.variant.reshaped:
            self._run.result["kept"] = whole(self._given, self._ckpt.extra)
        return step

    def save(self, step: int) -> None:
        run = self._run
        if self._armed:
            run.die()
        self._ckpt.save(step)
        if run.mode != "crash" or step != run.variant.kill:
            return
        if run.variant.disk == "every":
            self._await_commit(step)
        if run.variant.reshaped:
            run.result["kept"] = whole(self._given, self._ckpt.extra)
            (run.directory / f"kept-{run.rank}").write_text(json.dumps(run.result["kept"]))
        if run.variant.moment == SAVED:
            time.sleep(zlib.crc32(run.variant.name.encode()) % 5 / 1000)
            run.die()
        self._armed = True

    def close(self) -> None:
        self._ckpt.close()

    def _await_commit(self, step: int) -> None:
        manifest = self._run.directory / f"step-{step:08d}" / "manifest.json"
        end = time.monotonic() + WRITE_DEADLINE
        while not manifest.exists() and time.monotonic() < end:
            time.sleep(0.01)


def _refusing(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise RefusedError(f"{type(error).__name__}: {error}") from error


def whole(given: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, str]:
    """Digest of the objects' whole tensors, whatever ranks hold of them. All ranks call it."""
    models, optimizers = _named(given.get("model")), _named(given.get("optimizer"))
    names = {p: plain(n) for each in models.values() for n, p in each.named_parameters()}
    found: dict[str, Any] = {
        f"model.{at}": {plain(n): v for n, v in each.state_dict().items()}
        for at, each in models.items()
    }
    for at, each in optimizers.items():
        state = {
            names.get(p, str(i)) if isinstance(p, torch.Tensor) else str(p): value
            for i, (p, value) in enumerate(each.state.items())
        }
        groups = [{k: v for k, v in g.items() if k != "params"} for g in each.param_groups]
        more = {k: v for k, v in each.state_dict().items() if k not in ("state", "param_groups")}
        found[f"optimizer.{at}"] = {"state": state, "groups": groups, "more": more}
    found["extra"] = {
        n: v.state_dict() if hasattr(v, "state_dict") else v
        for n, v in extra.items() if not isinstance(v, torch.Generator)
    }  # fmt: skip
    return digest(found)


def plain(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    return name.replace("module.", "").replace("_orig_mod.", "")


def _named(found: Any) -> dict[str, Any]:
    if found is None:
        return {}
    if isinstance(found, Mapping):
        return {str(k): v for k, v in found.items()}
    several = found if isinstance(found, list | tuple) else [found]
    return {str(i): each for i, each in enumerate(several)}


def digest(value: Any, at: str = "") -> dict[str, str]:
    """Path → digest of each value in nested containers: dtype, shape and bits of tensors."""
    if isinstance(value, torch.Tensor):
        return {at: _of_tensor(value)}
    if isinstance(value, Mapping):
        parts = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple) or type(value).__name__ == "deque":
        parts = [(str(i), v) for i, v in enumerate(value)]
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        return {at: f"{value.dtype} {zlib.crc32(value.tobytes())}"}
    else:
        return {at: repr(value)}
    found = {at or ".": f"{len(parts)} items"}
    for name, part in parts:
        found |= digest(part, f"{at}.{name}" if at else name)
    return found


def _of_tensor(tensor: torch.Tensor) -> str:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    raw = tensor.contiguous().clone().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(raw)}"


# -- for the kinds


def x(step: int, *, rank: int | None = None) -> torch.Tensor:
    """The batch of a step, another one on each rank."""
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(step + 100 * rank)
    return torch.randn(BATCH, WIDTH, generator=generator)


def net(seed: int = 0, *, bias: bool = True) -> nn.Sequential:
    """A small model."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=bias), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=bias)
    )


def mse(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The loss of an autoencoder."""
    loss: torch.Tensor = (model(batch).float() - batch.float()).square().mean()
    return loss


def sgd(model: Any, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def adamw(model: Any, lr: float = 0.01) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def nothing(step: int) -> None:
    """Do nothing at this moment of a step."""


def loop(
    run: Run,
    model: Any,
    optimizer: Any,
    *,
    batch: Callable[[int], torch.Tensor] = x,
    loss: Callable[[Any, torch.Tensor], Any] = mse,
    before: Callable[[int], object] = nothing,
    update: Callable[[int], object] | None = None,
    after: Callable[[int], object] = nothing,
    late: Callable[[int], object] = nothing,
    also: Callable[[], Any] = lambda: None,
    forward: Any = None,
    hand: Mapping[str, Any] | None = None,
    **given: Any,
) -> Any:
    """Train as most scripts do. ``before``: at the begin of a step; ``update``: instead of
    ``optimizer.step()``; ``after``: before save(); ``late``: after it; ``also``: the state that is
    compared besides the model's; ``forward``: called instead of the model; ``hand``: arguments of
    the Checkpointer instead of these; ``given``: further ones."""
    ckpt = run.checkpointer(**{"model": model, "optimizer": optimizer, **given, **(hand or {})})
    for step in range(ckpt.resume(), run.steps):
        before(step)
        loss(forward or model, batch(step)).backward()
        optimizer.step() if update is None else update(step)
        for each in (model, optimizer):
            if hasattr(each, "zero_grad"):
                each.zero_grad()
        after(step)
        ckpt.save(step + 1)
        late(step)
    state = [dict(model.state_dict()), also()]
    found = digest(state)  # now: close() lets go of the objects
    ckpt.close()
    return found
