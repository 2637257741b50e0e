"""Tensor types as safetensors names them, and tensors laid over memory without a copy.

A type that safetensors has no name for is kept as the bytes of one that it has: ``storable`` gives
a view of the same memory, so writing to it writes the tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any

import torch

from .layout import Entry

TORCH: Mapping[str, torch.dtype] = {
    "C64": torch.complex64, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
    "F32": torch.float32, "I32": torch.int32, "U32": torch.uint32,
    "BF16": torch.bfloat16, "F16": torch.float16, "I16": torch.int16, "U16": torch.uint16,
    "BOOL": torch.bool, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),
}  # fmt: skip
"""safetensors' name → torch's type; the keys are those of ``layout.ITEM_SIZE``."""

NAME: Mapping[torch.dtype, str] = {dtype: name for name, dtype in reversed(list(TORCH.items()))}
"""torch's type → safetensors' name."""


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The type called ``name``; ValueError if this torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no type {name!r}")
    return dtype


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a view of its memory in a type that a snapshot can hold.

    Raises TypeError for a type that has no such view.
    """
    if tensor.dtype in NAME:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.itemsize == 1 and not tensor.is_quantized:
        return tensor.view(torch.uint8)
    raise TypeError(f"tensors of type {dtype_name(tensor.dtype)} cannot be saved")


def view(memory: Any, offset: int, entry: Entry) -> torch.Tensor:
    """The tensor of an entry whose data begins at byte ``offset`` of a buffer such as an mmap.

    Nothing is copied. Over read-only memory the tensor must not be written to.
    """
    dtype = TORCH[entry.dtype]
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=dtype, device="cpu")
    _silence()
    flat = torch.frombuffer(memory, dtype=dtype, count=prod(entry.shape), offset=offset)
    return flat.view(entry.shape)


@cache
def _silence() -> None:
    """Suppress the warning on read-only memory, which torch gives once per process: provoke it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)
