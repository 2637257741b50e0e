"""A random training loop, drawn by its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

EARLY, LATE = 1, 7
"""Steps at which partial writes begin: while every snapshot is watched, and long after."""
WIDTH, LARGE_WIDTH = 24, 1024
"""Widths of a layer. A snapshot has some KB, or 8 to 30 MB: over 2 MB it is copied beside the
training."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One training loop and its crash. Where something is ``off`` it does not occur."""

    seed: int
    steps: int
    model: str
    optimizer: str
    update: str
    """The way of the optimizer's step: ``step``, ``compiled``, or ``unseen``: written through a
    view of numpy, as a CUDA graph replays it, without hooks and version counters."""
    scheduler: str
    ema: str
    swap: str
    """The way in which an evaluation swaps the averaged weights in and out, after save()."""
    writes: str
    """The way in which weights are scaled outside the optimizer."""
    writes_at: str
    accumulate: int
    scaler: bool
    counter: str
    data: str
    save_at: str
    since: int
    """Swaps and writes begin at this step."""
    slow_ms: float
    """The copy thread begins so late, as under load."""
    crash_step: int
    crash_at: str
    partial: str
    """The way in which a few items of each weight are written without a version."""
    partial_at: str
    partial_since: int
    width: int = WIDTH


def draw(seed: int, large: bool = False) -> Loop:
    """The loop of a seed; ``large``: the same with a large state."""
    pick = random.Random(seed)
    steps = pick.randint(8, 14)
    drawn = Loop(
        seed=seed,
        steps=steps,
        model=pick.choice(["plain", "batchnorm", "dropout", "frozen", "tied", "flat"]),
        optimizer=pick.choice(["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "two"]),
        update=pick.choice(["step", "step", "step", "compiled", "unseen"]),
        scheduler=pick.choice(["off", "before save", "before save", "after save", "not given"]),
        ema=pick.choice(["off", "off", "before save", "before save", "after save"]),
        swap=pick.choice(["off", "off", "data", "numpy", "copy_"]),
        writes=pick.choice(["off", "off", "data", "numpy", "no_grad"]),
        writes_at=pick.choice(["before save", "after save", "before forward"]),
        accumulate=pick.choice([1, 1, 2, 3]),
        scaler=pick.random() < 0.2,
        counter=pick.choice(["off", "before save", "before save", "after save"]),
        data=pick.choice(["generator", "global", "loader", "workers"]),
        save_at=pick.choice(["end", "end", "end", "end", "end", "micro", "early"]),
        since=pick.choice([1, 1, 1, 6]),
        slow_ms=pick.choice([0.0, 1.0, 5.0, 20.0]),
        crash_step=pick.randint(1, steps - 1),
        crash_at=pick.choice(["save", "forward", "backward", "update", "end"]),
        partial=pick.choice(["off", "off", "clamp", "row"]),
        partial_at=pick.choice(["before save", "after save", "before forward"]),
        partial_since=pick.choice([EARLY, LATE]),
        width=LARGE_WIDTH if large else WIDTH,
    )
    if drawn.partial == "off":
        return drawn
    # A write that begins after the crash would test nothing, nor a late one that the copy misses.
    drawn = replace(drawn, crash_step=pick.randint(drawn.partial_since, steps - 1))
    if drawn.partial_since == EARLY:
        return drawn
    return replace(
        drawn,
        partial_at=pick.choice(["after save", "before forward", "before forward"]),
        slow_ms=pick.choice([1.0, 5.0, 20.0]),
        crash_at=pick.choice(["forward", "backward", "backward", "update"]),
    )
