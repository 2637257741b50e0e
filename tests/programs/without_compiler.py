"""Keeps torch's compiler out of a process that compiles nothing.

torch imports it when the first optimizer or DistributedDataParallel is made: 1.7 s of CPU, a third
of what a small rank costs in all. The examples and the demo's training have the real one.
"""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

CONFIG = "torch._dynamo.config"


class Config(ModuleType):
    """The settings that DTensors look at, each with torch's own default."""

    fake_tensor_cache_enabled = True
    fake_tensor_cache_crosscheck_enabled = False
    _custom_ops_profile = None


class NoCompiler(ModuleType):
    """The parts of torch's compiler that are used when nothing is compiled; all else fails."""

    config = Config(CONFIG)

    eval_frame = SimpleNamespace(OptimizedModule=type("OptimizedModule", (), {}))
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
    utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")

    @staticmethod
    def disable(fn: Any = None, *_: Any, **__: Any) -> Any:
        """Functions are as they are: none was to be compiled."""

        def same(fn: Callable[..., Any]) -> Callable[..., Any]:
            return fn

        return same if fn is None else fn

    @staticmethod
    def graph_break() -> None:
        """Do nothing: no graph is recorded."""


def install() -> None:
    """Replace the compiler from now on; one that is imported already stays."""
    if "torch._dynamo" not in sys.modules:
        torch._dynamo = sys.modules["torch._dynamo"] = NoCompiler("torch._dynamo")
        sys.modules[CONFIG] = NoCompiler.config
