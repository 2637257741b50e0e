"""The values of a sample: numpy arrays that own their memory, their length and their size."""

from __future__ import annotations

from typing import Any

OVERHEAD = 256  # bytes of the objects around a value, roughly


def as_arrays(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with lists of numbers as arrays: whole numbers as int32, others float32.

    Arrays keep their type. A view is copied: it would keep all of the file's rows in memory.
    """
    import numpy as np

    made = {}
    for name, value in values.items():
        if isinstance(value, (list, tuple)):
            array = np.asarray(value)
            if array.dtype.kind in "iu" or not len(value):
                array = np.asarray(value, dtype=np.int32)  # OverflowError: no token is so large
            elif array.dtype.kind == "f":
                array = array.astype(np.float32)
            made[name] = array
        elif isinstance(value, np.ndarray) and value.base is not None:
            made[name] = value.copy()
        else:
            made[name] = value
    return made


def tokens_of(values: dict[str, Any]) -> int:
    """Return the length of "tokens"; without it, that of all one-dimensional arrays, if it is one
    and the same; else 1."""
    if "tokens" in values:
        return len(values["tokens"])
    shapes = {getattr(value, "shape", None) for value in values.values()}
    shape = shapes.pop() if len(shapes) == 1 else None
    return int(shape[0]) if shape is not None and len(shape) == 1 else 1


def size_of(values: dict[str, Any]) -> int:
    """Return about how many bytes of memory the values take."""
    return sum(_size(value) for value in values.values())


def _size(value: Any) -> int:
    size = getattr(value, "nbytes", None)  # also of a torch.Tensor
    if size is None:
        size = len(value) if isinstance(value, (bytes, bytearray, str)) else 0
    return int(size) + OVERHEAD
