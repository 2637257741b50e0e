"""The sum of a device's tensor: of all bits, without memory that a full device does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from robust_slurm.checkpoint.capture import sharing
from robust_slurm.checkpoint.copying import snapshot

CHUNK = 1024


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation has made, with what sum() makes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = call(*args, **(kwargs or {}))
        if call is torch.ops.aten.sum.default:
            self.bytes = max(self.bytes, args[0].numel() * 8)
        elif isinstance(made, torch.Tensor) and not call.is_view:
            self.bytes = max(self.bytes, made.nbytes)
        return made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sharing, snapshot):
        monkeypatch.setattr(module, "CHUNK", CHUNK, raising=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float64])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "channels last", "every second"])
def test_it_is_taken_in_pieces_and_covers_every_item(kind: str, dtype: torch.dtype) -> None:
    whole = torch.arange(1, 1 + 2 * 3 * 16 * 16).remainder(7).view(2, 3, 16, 16).to(dtype)
    tensor = {
        "contiguous": whole,
        "transposed": whole.view(6, 256).t(),
        "channels last": whole.to(memory_format=torch.channels_last),
        "every second": whole.view(-1)[::2],
    }[kind]
    with Largest() as largest:
        one = int(sharing._sum(tensor))
    assert largest.bytes <= CHUNK
    assert int(sharing._sum(tensor.contiguous())) == one
    tensor[(-1,) * tensor.dim()] = 0 if tensor[(-1,) * tensor.dim()] else 1
    assert int(sharing._sum(tensor)) != one


@pytest.mark.parametrize("tensor", [torch.empty(0, 4), torch.tensor(0.0), torch.zeros(3)])
def test_nothing_and_zeros_sum_up_to_nothing(tensor: torch.Tensor) -> None:
    assert int(sharing._sum(tensor)) == 0
