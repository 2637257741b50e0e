"""Reinforcement learning, GANs, diffusion, distillation, contrastive learning and others."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

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
)  # fmt: skip


class Ring:
    """A replay buffer of tensors, written in place."""

    def __init__(self) -> None:
        self.rows, self.at, self.full = torch.zeros(24, WIDTH), 0, False

    def add(self, batch: torch.Tensor) -> None:
        for each in batch:
            self.rows[self.at] = each
            self.at = (self.at + 1) % 24
            self.full |= self.at == 0

    def sample(self, n: int) -> torch.Tensor:
        return self.rows[torch.randint(24 if self.full else self.at, (n,))]

    def state_dict(self) -> Any:
        return {"rows": self.rows, "at": self.at, "full": self.full}

    def load_state_dict(self, state: Any) -> None:
        self.rows.copy_(state["rows"])
        self.at, self.full = state["at"], state["full"]


class World:
    """An environment with a state and a generator of its own."""

    def __init__(self) -> None:
        self.generator, self.state, self.steps = np.random.default_rng(4), np.zeros(WIDTH), 0

    def step(self, action: torch.Tensor) -> torch.Tensor:
        self.state = (
            0.9 * self.state + 0.1 * action.numpy() + 0.1 * self.generator.normal(size=WIDTH)
        )
        self.steps += 1
        if self.steps % 7 == 0:
            self.state = self.generator.normal(size=WIDTH)
        return torch.as_tensor(self.state).float()

    def state_dict(self) -> Any:
        return {
            "generator": self.generator.bit_generator.state, "state": self.state,
            "steps": self.steps,
        }  # fmt: skip

    def load_state_dict(self, state: Any) -> None:
        self.generator.bit_generator.state = state["generator"]
        self.state, self.steps = np.array(state["state"]), state["steps"]


@kind(r"extra\.(buffer|world)", options=("after the update", "before the update"), variants=4)
def replay_buffer(run: Run) -> Any:
    """An environment and a replay buffer, filled after or before the optimizer's step."""
    model, world, buffer = net(), World(), Ring()
    optimizer = adamw(model)

    @torch.no_grad()
    def act(step: int) -> None:
        for _ in range(4):
            buffer.add(world.step(model(torch.as_tensor(world.state).float())).unsqueeze(0))

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        return mse(m, buffer.sample(BATCH) if buffer.at or buffer.full else b)

    moment = "after" if run.option.startswith("after") else "before"
    return loop(
        run, model, optimizer, loss=loss, extra={"buffer": buffer, "world": world}, **{moment: act}
    )


@kind(r"extra\.memory", options=("deque of tuples", "list of dicts", "dict of arrays"))
def replay_in_containers(run: Run) -> Any:
    """A replay buffer in plain containers."""
    model = net()
    memory: Any = deque(maxlen=6) if run.option.startswith("deque") else []
    if run.option.startswith("dict"):
        memory = {"states": np.zeros((6, WIDTH), np.float32), "at": np.zeros(1, int)}

    def before(step: int) -> None:
        state = x(step)[0]
        if run.option.startswith("deque"):
            memory.append((state, step % 3, float(step)))
        elif run.option.startswith("list"):
            memory.append({"state": state, "reward": step / 3})
        else:
            memory["states"][int(memory["at"][0]) % 6] = state.numpy()
            memory["at"] += 1

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        if run.option.startswith("dict"):
            return mse(m, torch.as_tensor(memory["states"]).clone())
        chosen = random.choice(list(memory))
        return mse(m, chosen["state"] if isinstance(chosen, dict) else chosen[0])

    return loop(
        run, model, sgd(model), before=before, loss=loss, extra={"memory": memory},
        also=lambda: memory,
    )  # fmt: skip


@kind(r"extra\.norm|model")
def ppo(run: Run) -> Any:
    """Rollouts, several epochs of minibatches a step, running statistics, an old policy."""
    model, world = net(), World()
    old = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)
    norm = {"mean": np.zeros(WIDTH), "count": np.ones(1)}

    def update(step: int) -> None:
        with torch.no_grad():
            rollout = torch.stack([world.step(torch.randn(WIDTH)) for _ in range(8)])
        norm["mean"] += (rollout.mean(0).numpy() - norm["mean"]) / norm["count"]
        norm["count"] += 1
        rollout = rollout - torch.as_tensor(norm["mean"]).float()
        for _ in range(2):
            for rows in torch.randperm(8).split(4):
                optimizer.zero_grad()
                ratio = (model(rollout[rows]) - old(rollout[rows])).square().mean()
                (ratio + mse(model, rollout[rows])).backward()
                optimizer.step()
        old.load_state_dict(model.state_dict())

    return loop(
        run, model, optimizer, update=update,
        extra={"old": old, "norm": norm, "world": world}, also=lambda: [norm, old.state_dict()],
    )  # fmt: skip


@kind(r"extra\.epsilon|epsilon")
def epsilon_greedy(run: Run) -> Any:
    """Exploration decays by a count in extra; actions by Python's generator."""
    model = net()
    epsilon = {"value": 1.0}
    random.seed(3)

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        return mse(m, torch.randn_like(b) if random.random() < epsilon["value"] else b)

    def after(step: int) -> None:
        epsilon["value"] *= 0.8

    return loop(run, model, sgd(model), loss=loss, after=after, extra={"epsilon": epsilon})


@kind("model|optimizer", options=("each step", "critic three times", "in lists"))
def gan(run: Run) -> Any:
    """Two models and two optimizers that take turns."""
    g, d = net(0), net(1)
    optimizers = {
        "g": torch.optim.Adam(g.parameters(), 0.01),
        "d": torch.optim.Adam(d.parameters(), 0.01),
    }
    lists = run.option == "in lists"
    ckpt = run.checkpointer(
        model=[g, d] if lists else {"g": g, "d": d},
        optimizer=[*optimizers.values()] if lists else optimizers,
    )
    torch.manual_seed(5)
    for step in range(ckpt.resume(), run.steps):
        for _ in range(3 if run.option.startswith("critic") else 1):
            optimizers["d"].zero_grad()
            fake = g(torch.randn(BATCH, WIDTH)).detach()
            (d(fake).mean() - d(x(step)).mean() + d(fake).square().mean()).backward()
            optimizers["d"].step()
        optimizers["g"].zero_grad()
        (-d(g(torch.randn(BATCH, WIDTH))).mean()).backward()
        optimizers["g"].step()
        ckpt.save(step + 1)
    found = digest([g.state_dict(), d.state_dict()])
    ckpt.close()
    return found


@kind(r"extra\.(noise|ema)")
def diffusion(run: Run) -> Any:
    """Noise and times by a generator of its own, EMA of the weights, warm-up."""
    model = net()
    average = copy.deepcopy(model).requires_grad_(False)
    noise = torch.Generator().manual_seed(11)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 4))

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        t = torch.rand(len(b), 1, generator=noise)
        e = torch.randn(b.shape, generator=noise)
        result: torch.Tensor = (m((1 - t) * b + t * e) - e).square().mean()
        return result

    @torch.no_grad()
    def after(step: int) -> None:
        scheduler.step()
        for mine, p in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(p, 0.1)

    return loop(
        run, model, optimizer, loss=loss, after=after, also=average.state_dict,
        extra={"noise": noise, "ema": average, "scheduler": scheduler},
    )  # fmt: skip


@kind("model|teacher", options=("given", "not given", "in extra"), variants=3)
def distillation(run: Run) -> Any:
    """A frozen teacher."""
    student, teacher = net(0), net(1).requires_grad_(False).eval()
    hand: dict[str, Any] = {}
    if run.option == "given":
        hand = {"model": {"student": student, "teacher": teacher}}
    if run.option == "in extra":
        hand = {"extra": {"teacher": teacher}}
    loss = lambda m, b: (m(b) - teacher(b)).square().mean()  # noqa: E731
    return loop(run, student, adamw(student), loss=loss, hand=hand)


@kind("model|reference")
def preference(run: Run) -> Any:
    """DPO: a frozen reference that is a copy of the start's weights, and not given."""
    model = net()
    reference = copy.deepcopy(model).requires_grad_(False)
    loss = lambda m, b: -nn.functional.logsigmoid((m(b) - reference(b)).sum(-1)).mean()  # noqa: E731
    return loop(run, model, adamw(model), loss=loss)


class Queue(nn.Module):
    """MoCo: a queue of keys and its position as buffers, a key encoder that lags."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = net(0), net(0).requires_grad_(False)
        self.register_buffer(
            "queue", torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(2))
        )
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, p in zip(self.key.parameters(), self.query.parameters(), strict=True):
                mine.lerp_(p, 0.1)
            keys = self.key(batch)
        loss = (self.query(batch) @ self.queue.clone().T).logsumexp(1).mean() - (
            self.query(batch) * keys
        ).mean()
        at = int(self.at)
        self.queue[at : at + BATCH] = keys
        self.at.fill_((at + BATCH) % 24)
        return loss * 0.01


@kind("model")
def contrastive(run: Run) -> Any:
    model = Queue()
    return loop(run, model, sgd(model.query), loss=lambda m, b: m(b))


@kind("model|optimizer")
def meta_learning(run: Run) -> Any:
    """An inner loop with a throw-away optimizer on a copy of the weights."""
    model = net()
    outer = adamw(model)

    def update(step: int) -> None:
        inner = copy.deepcopy(model)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for i in range(2):
            optimizer.zero_grad()
            mse(inner, x(step * 3 + i)).backward()
            optimizer.step()
        outer.zero_grad()
        for p, q in zip(model.parameters(), inner.parameters(), strict=True):
            p.grad = (p - q).detach()
        outer.step()

    return loop(run, model, outer, update=update)


@kind(r"extra\.(labelled|pool)")
def active_learning(run: Run) -> Any:
    """A set of labelled samples that grows by the model's own choice, in extra."""
    model = net()
    labelled: list[int] = [0]

    @torch.no_grad()
    def after(step: int) -> None:
        rest = [i for i in range(20) if i not in labelled]
        labelled.append(max(rest, key=lambda i: float(mse(model, x(i)))))

    loss = lambda m, b: mse(m, torch.cat([x(i) for i in labelled]))  # noqa: E731
    return loop(run, model, sgd(model), loss=loss, after=after, extra={"labelled": labelled})


@kind(r"extra\.(rollouts|queue)|model")
def rollouts_ahead(run: Run) -> Any:
    """GRPO with rollouts of the last step's policy, which wait in extra."""
    model = net()
    waiting: deque[torch.Tensor] = deque([x(0)], maxlen=2)

    def after(step: int) -> None:
        with torch.no_grad():
            waiting.append(model(torch.randn(BATCH, WIDTH)))

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        weights = waiting[0].mean(1, keepdim=True)
        weights = (weights - weights.mean()) / (weights.std() + 1e-6)
        result: torch.Tensor = (weights * (m(b) - b).square()).mean()
        return result

    torch.manual_seed(8)
    return loop(
        run, model, sgd(model, 0.01), loss=loss, after=after, extra={"rollouts": waiting},
        also=lambda: list(waiting),
    )  # fmt: skip


@kind(r"extra\.members")
def population(run: Run) -> Any:
    """Population-based training: the worst member copies the best one's weights and settings."""
    members = [net(i) for i in range(3)]
    optimizers = [sgd(m, 0.05 * (i + 1)) for i, m in enumerate(members)]
    scores = [math.inf] * 3
    random.seed(1)
    ckpt = run.checkpointer(model=members, optimizer=optimizers, extra={"scores": scores})
    for step in range(ckpt.resume(), run.steps):
        for i, (m, o) in enumerate(zip(members, optimizers, strict=True)):
            loss = mse(m, x(step))
            loss.backward()
            o.step()
            o.zero_grad()
            scores[i] = float(loss)
        if step % 3 == 2:
            best, worst = scores.index(min(scores)), scores.index(max(scores))
            members[worst].load_state_dict(members[best].state_dict())
            optimizers[worst].param_groups[0]["lr"] = optimizers[best].param_groups[0][
                "lr"
            ] * random.choice([0.8, 1.2])
        ckpt.save(step + 1)
    found = digest([[m.state_dict() for m in members], scores])
    ckpt.close()
    return found
