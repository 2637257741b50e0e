"""A machine that computes wrongly: found first on PYTHONPATH, in every Python of the job.

On the node LAB_WRONG_NODE, while the file LAB_WRONG_FILE exists, torch's kernels for matrix
products on the CPU (aten::mm, aten::addmm) put one wrong number into what they return: NaN, or with
LAB_WRONG=flip the right number with its lowest exponent bit changed. Nothing above them can tell.

With LAB_BRIEF, on any node: what a test of the machines repeats for some seconds, it repeats for a
tenth of them. Each does all of its work once or twice at least, so what it finds stays the same.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any


def break_kernels(_: Any) -> None:
    import torch

    flip = os.environ.get("LAB_WRONG") == "flip"
    switch = os.environ["LAB_WRONG_FILE"]

    def wrong(out: Any) -> Any:
        if out.dtype == torch.float32 and out.numel() and os.path.exists(switch):  # noqa: PTH110
            bits = out.view(torch.int32)
            bits[-1, -1] = bits[-1, -1] ^ (1 << 23) if flip else 0x7FC00000
        return out

    # The variants with out= have the same kernel, and stay as they are: these call them.
    def mm(a: Any, b: Any) -> Any:
        return wrong(torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1])))

    def addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        out = a.new_empty(a.shape[0], b.shape[1])
        return wrong(torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out))

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", mm, "CPU")
    library.impl("addmm", addmm, "CPU")
    torch._lab_wrong = library  # type: ignore[attr-defined]  # else it is undone at once


def shorten(module: Any) -> None:
    """``run`` and ``Work`` are what is given the seconds of a test."""

    def brief(made: Callable[..., Any], at: int) -> Callable[..., Any]:
        @functools.wraps(made)
        def call(*args: Any) -> Any:
            return made(*args[:at], args[at] / 10, *args[at + 1 :])

        return call

    for name, at in SECONDS[module.__name__.rpartition(".")[2]]:
        setattr(module, name, brief(getattr(module, name), at))


WORKER = "health.active.worker."
SECONDS = {
    "bitwise": [("run", 3)],
    "gemm": [("run", 1)],
    "memory": [("run", 2)],
    "collective": [("Work", 1)],
}
"""Functions that are given seconds, by module, and which argument that is."""


class After(importlib.abc.MetaPathFinder):
    """Changes modules when they have been imported, once each."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


changes: dict[str, Callable[[Any], None]] = {}
if os.environ.get("SLURMD_NODENAME", "-") == os.environ.get("LAB_WRONG_NODE"):
    changes["torch"] = break_kernels
if "LAB_BRIEF" in os.environ:
    changes |= {WORKER + name: shorten for name in SECONDS}
if changes:
    sys.meta_path.insert(0, After(changes))
