"""The values of a sample: numpy arrays that own their memory, their length and their size."""

from __future__ import annotations

import copy
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

BEYOND = "a list has a number beyond 32 bits: return an array of int64"
_FIXED = (str, bytes, bool, int, float, complex, type(None))
OVERHEAD = 256  # bytes of the objects around a value, roughly


def as_arrays(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with lists of numbers as arrays: whole ones as int32, others as float32.

    Arrays and tensors keep their type, and are copied: ``decode`` may return the same buffer for
    every record, and a view would keep all of the file's rows in memory.
    """
    return {
        name: _of_list(value) if isinstance(value, (list, tuple)) else _own(value)
        for name, value in values.items()
    }


def _own(value: Any) -> Any:
    """Return a value that no later ``decode`` changes."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, _FIXED):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if type(value) in (list, tuple):
        return type(value)(_own(each) for each in value)
    if type(value) is dict:
        return {name: _own(each) for name, each in value.items()}
    if hasattr(value, "detach") and hasattr(value, "clone"):
        return value.detach().clone()
    try:
        return copy.deepcopy(value)  # array.array, an image, an object of the script's own
    except Exception:  # noqa: BLE001 - it cannot be copied
        return value


def as_array(value: Any) -> Any:
    """Return a tensor, or what else holds numbers, as an array of the same memory; other values as
    they are. Raises what the tensor's library raises for numbers that numpy has not."""
    import numpy as np

    if isinstance(value, np.ndarray) or not hasattr(value, "__array__"):
        return value
    return value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)


def token_ids(value: Any) -> Any:
    """Return a list or array of whole numbers as int32. Raises ValueError."""
    import numpy as np

    if isinstance(value, (list, tuple)):
        try:
            return np.array(array("i", value))  # quicker than numpy's look at each type
        except TypeError:
            raise ValueError('"tokens" is no list of whole numbers') from None
        except OverflowError:
            raise ValueError('"tokens" has a number beyond 32 bits') from None
    found = np.asarray(value)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError('"tokens" is no list of whole numbers')
    made = found.astype(np.int32)
    if not np.can_cast(found.dtype, np.int32) and np.count_nonzero(made != found):
        raise ValueError('"tokens" has a number beyond 32 bits')
    return made


def _of_list(value: list[Any] | tuple[Any, ...]) -> Any:
    import numpy as np

    try:
        return np.array(array("i", value))
    except OverflowError:
        raise ValueError(BEYOND) from None
    except TypeError:
        made = np.asarray(value)
    if made.dtype.kind == "i":
        if made.size and not -(1 << 31) <= made.min() <= made.max() < 1 << 31:
            raise ValueError(BEYOND)
        return made.astype(np.int32)
    if made.dtype.kind == "f":
        return made.astype(np.float32)
    return _own(value) if made.dtype.kind in "OUS" else made


def tokens_of(values: Mapping[str, Any]) -> int:
    """Return the length of "tokens"; without it, that of all one-dimensional arrays, if it is one
    and the same; else 1."""
    if "tokens" in values:
        return len(values["tokens"])
    shapes = {getattr(value, "shape", None) for value in values.values()}
    shape = shapes.pop() if len(shapes) == 1 else None
    return int(shape[0]) if shape is not None and len(shape) == 1 else 1


def size_of(values: dict[str, Any]) -> int:
    """Return about how many bytes of memory the values take."""
    total = OVERHEAD * len(values)
    for value in values.values():
        size = getattr(value, "nbytes", None)  # also of a torch.Tensor
        if size is None:
            size = len(value) if isinstance(value, (bytes, bytearray, str)) else 0
        total += size
    return int(total)
