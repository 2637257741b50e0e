"""The random number generators of a process: Python's, numpy's, torch's on every device."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch


def states() -> dict[str, Any]:
    """The state of every generator that this process can have used, as plain values."""
    state: dict[str, Any] = {
        "python": get(random._inst),  # what random.random() uses
        "torch": torch.get_rng_state(),
    }
    if "numpy.random" in sys.modules:
        state["numpy"] = sys.modules["numpy.random"].get_state(legacy=False)
    # A device that was never used has no generator; asking for one would initialise CUDA.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())]
        state["cuda_current"] = torch.cuda.current_device()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set them all as they were. Raises ValueError for what is no such state."""
    put(random._inst, state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy.random

        numpy.random.set_state(state["numpy"])
    if "cuda" in state:
        saved = state["cuda"]
        if torch.cuda.device_count() == len(saved):
            torch.cuda.set_rng_state_all(saved)
        else:  # started with other devices visible: the one in use goes on
            torch.cuda.set_rng_state(saved[state["cuda_current"]])


def is_generator(found: object) -> bool:
    """True if ``found`` is a generator of its own that can be saved."""
    numpy = sys.modules.get("numpy.random")
    own = (random.Random, torch.Generator)
    return isinstance(found, own) or (
        numpy is not None and isinstance(found, numpy.Generator | numpy.RandomState)
    )


def get(generator: Any) -> Any:
    """The state of one generator, as plain values."""
    if isinstance(generator, random.Random):
        version, internal, gauss = generator.getstate()
        return [version, array("I", internal).tobytes(), gauss]
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def put(generator: Any, state: Any) -> None:
    """Set the state of one generator."""
    if isinstance(generator, random.Random):
        version, internal, gauss = state
        generator.setstate((version, tuple(array("I", internal)), gauss))
    elif isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
