"""One random training loop of ``bench.checkpoint_loops``, in forks of this process.

Each line on stdin is an order: the loop, where its result and stderr go, and for a run with a
Checkpointer the store's socket, its epoch and whether it is killed at its crash. Each is answered
with the exit code (or minus the signal) of the fork.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchdata.stateful_dataloader as stateful  # type: ignore[import-untyped]
from torch import nn

from bench.checkpoint_loops import Loop
from robust_slurm import Checkpointer
from robust_slurm.checkpoint.copying import snapshot

WIDTH, BATCH = 24, 4
SCALE = 0.98
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.relu(self.first(x)))
        return result


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that depend on their number alone."""

    def __len__(self) -> int:
        return 5 * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH) * (index + 1.0))


class Training:
    """The objects that a loop trains with, and one step of it."""

    def __init__(self, loop: Loop) -> None:
        torch.manual_seed(loop.seed)
        self.loop = loop
        self.model = _model(loop.model)
        if loop.model == "flat":
            self.flat = _flatten(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if loop.optimizer == "two":
            half = len(trained) // 2
            parts = {"adam": trained[:half], "sgd": trained[half:]}
            self.optimizers = [OPTIMIZERS[kind](part) for kind, part in parts.items()]
        else:
            self.optimizers = [OPTIMIZERS[loop.optimizer](trained)]
        self.trained = trained
        self.ema = torch.optim.swa_utils.AveragedModel(self.model) if loop.ema != "off" else None
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(each, 2, 0.7)
            for each in (self.optimizers if loop.scheduler != "off" else ())
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if loop.scaler else None
        self.generator = torch.Generator().manual_seed(loop.seed)
        self.loader = stateful.StatefulDataLoader(
            Samples(), BATCH, shuffle=True, num_workers=2 if loop.data == "workers" else 0
        )
        self.batches: Iterator[torch.Tensor] = iter(())
        self.tokens = 0
        self.checkpointer: Checkpointer | None = None
        self._steps: list[Callable[[], object]] = [each.step for each in self.optimizers]
        if loop.update == "compiled":
            self._steps = [torch.compile(each, backend="eager") for each in self._steps]

    def extra(self) -> dict[str, Any]:
        """Return the objects that the script gives to save besides."""
        given: dict[str, Any] = {"generator": self.generator}
        if self.loop.scheduler not in ("off", "not given"):
            given |= {f"scheduler{i}": each for i, each in enumerate(self.schedulers)}
        if self.ema is not None:
            given["ema"] = self.ema
        if self.scaler is not None:
            given["scaler"] = self.scaler
        if self.loop.counter != "off":
            given["tokens"] = 0
        return given

    def batch(self) -> torch.Tensor:
        """The next one."""
        if self.loop.data == "global":
            return torch.randn(BATCH, WIDTH)
        if self.loop.data == "generator":
            return torch.randn(BATCH, WIDTH, generator=self.generator)
        while True:  # a loader that is restored at the end of a pass has no more batches in it
            for batch in self.batches:
                return batch
            self.batches = iter(self.loader)

    def backward(self, number: int, micro: int) -> None:
        """Forward and backward of one micro-batch."""
        x = self.batch()
        loss = (self.model(x) - x).square().mean() / self.loop.accumulate
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
            if number % 4 == 3 and micro == 0:
                loss = loss * float("inf")
        loss.backward()

    def update(self) -> None:
        """The optimizer's step, with gradients."""
        nn.utils.clip_grad_norm_(self.trained, 1.0) if self.scaler is None else None
        if self.loop.update == "unseen":
            for p in self.trained:
                if p.grad is not None and bool(torch.isfinite(p.grad).all()):
                    p.detach().numpy()[...] -= 0.1 * p.grad.numpy()
        elif self.scaler is not None:
            for each in self.optimizers:
                self.scaler.step(each)
            self.scaler.update()
        else:
            for step in self._steps:
                step()
        for each in self.optimizers:
            each.zero_grad()

    def scale_weights(self) -> None:
        """Weight decay as some scripts do it: outside the optimizer."""
        for p in self.trained:
            if self.loop.writes == "data":
                p.data.mul_(SCALE)
            elif self.loop.writes == "numpy":
                p.detach().numpy()[...] *= SCALE
            else:
                with torch.no_grad():
                    p.mul_(SCALE)

    def evaluate(self) -> None:
        """With other weights, for a moment."""
        kept = [p.detach().clone() for p in self.trained]
        for of in ([k * 0.5 for k in kept], kept):
            for p, new in zip(self.trained, of, strict=True):
                if self.loop.swap == "data":
                    p.data.copy_(new)
                elif self.loop.swap == "numpy":
                    p.detach().numpy()[...] = new.numpy()
                else:
                    with torch.no_grad():
                        p.copy_(new)
            time.sleep(0.002)  # the evaluation

    def count(self) -> None:
        """Plain Python state of the script."""
        self.tokens += BATCH
        if self.checkpointer is not None and "tokens" in self.checkpointer.extra:
            self.checkpointer.extra["tokens"] = self.tokens

    def tail(self, number: int, when: str) -> None:
        """Do the script's work of once a step, ``when`` before or after save()."""
        loop = self.loop
        if loop.scheduler == when or (loop.scheduler == "not given" and when == "before save"):
            for each in self.schedulers:
                each.step()
        if loop.ema == when and self.ema is not None:
            self.ema.update_parameters(self.model)
        if loop.counter == when:
            self.count()
        if loop.writes != "off" and loop.writes_at == when and number >= loop.since:
            self.scale_weights()
        if loop.swap != "off" and when == "after save" and number >= loop.since:
            self.evaluate()

    def state(self) -> int:
        """crc32 of all that a training goes on from."""
        crc = zlib.crc32(repr((self.tokens, [s.state_dict() for s in self.schedulers])).encode())
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        tensors += self.ema.state_dict().values() if self.ema is not None else ()
        for optimizer in self.optimizers:
            for p in self.trained:
                part = optimizer.state.get(p, {})
                tensors += [v for _, v in sorted(part.items()) if isinstance(v, torch.Tensor)]
        for tensor in tensors:
            crc = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), crc)
        return crc


def _model(kind: str) -> nn.Module:
    if kind == "tied":
        return Tied()
    middle: dict[str, Callable[[], nn.Module]] = {
        "batchnorm": lambda: nn.BatchNorm1d(WIDTH), "dropout": lambda: nn.Dropout(0.2)
    }  # fmt: skip
    layers = [nn.Linear(WIDTH, WIDTH), middle.get(kind, nn.ReLU)(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    if kind == "frozen":
        model[0].requires_grad_(False)
    return model


def _flatten(model: nn.Module) -> torch.Tensor:
    """Have all parameters be views of one buffer, as Megatron and apex do."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    at = 0
    for p in model.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    return flat


def train(loop: Loop, order: dict[str, Any]) -> dict[str, Any]:
    """Run the loop; what it ends with."""
    training = Training(loop)
    began = 0
    save: Callable[[int], None] = lambda step: None  # noqa: E731
    if "socket" in order:
        _slow_down(loop.slow_ms / 1000)
        training.checkpointer = ckpt = Checkpointer(
            model=training.model, optimizer=training.optimizers, extra=training.extra(),
            loader=training.loader if loop.data in ("loader", "workers") else None,
        )  # fmt: skip
        began, save = ckpt.resume(), ckpt.save
        training.tokens = ckpt.extra.get("tokens", 0)
    crash = order.get("crash", False)

    def at(number: int, moment: str) -> None:
        if crash and (number, moment) == (loop.crash_step, loop.crash_at):
            time.sleep(loop.seed % 7 / 1000)
            os.kill(os.getpid(), signal.SIGKILL)

    each = 1 if loop.save_at == "micro" else loop.accumulate  # micro-steps to a save
    for micro in range(began * each, loop.steps * loop.accumulate):
        number, part = micro // loop.accumulate + 1, micro % loop.accumulate
        if part == 0 and loop.writes_at == "before forward":
            training.tail(number, "before forward")
        at(number, "forward")
        training.backward(number, part)
        if part < loop.accumulate - 1:
            if loop.save_at == "micro":
                save(micro + 1)
            continue
        at(number, "backward")
        if loop.save_at == "early":
            save(number)
            at(number, "save")
        training.update()
        at(number, "update")
        training.tail(number, "before save")
        if loop.save_at != "early":
            save((micro + 1) // each)
            at(number, "save")
        training.tail(number, "after save")
        at(number, "end")
    state = training.state()
    if training.checkpointer is not None:
        training.checkpointer.close()
    return {"state": state, "began": began * each // loop.accumulate}


def _slow_down(seconds: float) -> None:
    """A copy thread that gets the processor late: this machine is too quick to tear anything."""
    run = snapshot.Copy.run

    def late(copy: snapshot.Copy) -> None:
        time.sleep(seconds)
        run(copy)

    snapshot.Copy.run = late  # type: ignore[method-assign,assignment]


def _in_fork(order: dict[str, Any]) -> int:
    logging.disable(logging.WARNING)
    err = os.open(order["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(err, 2)
    signal.alarm(int(order["deadline"]))
    warnings.simplefilter("ignore")
    if "socket" in order:
        os.environ["ROBUST_CKPT_SOCKET"] = order["socket"]
        os.environ["ROBUST_EPOCH"] = str(order["epoch"])
    try:
        found = train(Loop(**order["loop"]), order)
        with open(order["result"], "w", encoding="utf-8") as file:
            json.dump(found, file)
    except BaseException:  # noqa: BLE001 - the parent's code must not go on here
        traceback.print_exc()
        return 1
    return 0


def _import_compiler() -> None:
    """Compile once, or each fork that compiles imports all of it: 2 s."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.compile(torch.optim.SGD([parameter]).step, backend="eager")()


def main() -> None:
    torch.set_num_threads(1)
    _import_compiler()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            code = _in_fork(order)
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
