"""Values of a state that are no tensors, as JSON that gives back exactly the same values.

Types are kept (tuple and list, int and bool and numpy's), floats bit for bit. Numbers within 64
bits, finite floats, strings and lists stand for themselves; all else is an object with one key,
its tag. A tensor is left to the caller, who answers with a ``TensorRef`` to its data. What is
decoded is treated as hostile: nothing is imported and nothing is called but constructors of the
types below.
"""

from __future__ import annotations

import ctypes
import enum
import math
import struct
import sys
from array import array
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..format.dtypes import dtype_name, dtype_of

INLINE = 4096  # bytes: longer strings of bytes, arrays and lists of numbers are kept as tensors
MANY = INLINE // 8  # numbers

FACTORIES: Mapping[str, Any] = {
    t.__name__: t for t in (bool, bytes, dict, float, int, list, set, str, tuple)
}
"""Callables that a defaultdict may make its defaults with."""


class TensorRef(NamedTuple):
    """Reference to a tensor's data, with facts that its entry does not hold."""

    fqn: str
    """Name of its entry."""
    dtype: str = ""
    """torch's name, where the entry holds its bytes as another type."""
    device: str = ""
    """Type of the device where it was, if not the CPU."""
    stride: tuple[int, ...] = ()
    """In items, of a tensor that is dense but not in row order (channels last)."""
    placements: tuple[str, ...] = ()
    """Placements of a distributed tensor: one per dimension of its mesh."""
    mesh: tuple[int, ...] = ()
    """Shape of that mesh."""
    shape: tuple[int, ...] = ()
    """Shape of the whole tensor, where the entry describes only this rank's part."""
    frozen: bool = False
    """A parameter that was not trained."""


Encoded = Any
"""JSON-able."""
Path = str
Save = Callable[[Path, torch.Tensor], Encoded]
"""Takes a tensor found at a path and answers ``encode_ref`` of where it goes."""


def encode_ref(ref: TensorRef) -> Encoded:
    """Encode a reference, as short as it can be."""
    if not any(ref[1:]):
        return {"T": ref.fqn}
    return {"T": [ref.fqn, {k: v for k, v in ref._asdict().items() if v and k != "fqn"}]}


def _decode_ref(body: Encoded) -> TensorRef:
    if isinstance(body, str):
        return TensorRef(body)
    fqn, more = body
    lists = {k: tuple(more[k]) for k in ("stride", "placements", "mesh", "shape") if k in more}
    return TensorRef(fqn, **{**more, **lists})


def ref_of(encoded: Encoded) -> TensorRef | None:
    """Return the reference that stands for a tensor; None for any other value. Raises ValueError
    for a reference that this version does not know."""
    if isinstance(encoded, dict) and encoded.keys() == {"T"}:
        try:
            return _decode_ref(encoded["T"])
        except TypeError as err:
            raise ValueError(f"not a reference of a snapshot: {err}") from err
    return None


def holds_tensor(value: Any) -> bool:
    """True for a tensor, and for a dict, list, tuple or set that holds one at any depth."""
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(holds_tensor, value))
    return isinstance(value, torch.Tensor)


def encode(value: Any, path: Path, tensor: Save) -> Encoded:
    """``value`` as JSON-able data. Raises TypeError that names the path of what it cannot keep."""
    try:
        return _encode(value, path, tensor)
    except RecursionError:
        raise TypeError(f"{path}: nested too deep, or it contains itself") from None


def _encode(value: Any, path: Path, tensor: Save) -> Encoded:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    encoder = _ENCODERS.get(kind)
    if encoder is not None:
        return encoder(value, path, tensor)
    if isinstance(value, torch.Tensor):
        return tensor(path, value)
    if isinstance(value, enum.Enum) and value.name in kind.__members__:
        return {"enum": [kind.__module__, kind.__qualname__, value.name]}
    numpy = sys.modules.get("numpy")
    # Other subclasses hold more than their data, such as the mask of a masked array.
    if numpy is not None and (
        isinstance(value, numpy.generic) or kind in (numpy.ndarray, numpy.memmap)
    ):
        return _encode_numpy(value, path, tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if hasattr(value, "state_dict"):
        raise TypeError(
            f"{path}: a {name} cannot be saved there; put in its place what its state_dict() "
            "returns, and hand that to its load_state_dict()"
        )
    raise TypeError(
        f"{path}: a {name} cannot be saved; give it a state_dict() "
        f"of tensors, numbers, strings, lists and dicts"
    )


def _int(value: int, path: Path, tensor: Save) -> Encoded:
    return value if -(1 << 63) <= value < 1 << 64 else {"i": hex(value)}


def _float(value: float, path: Path, tensor: Save) -> Encoded:
    return value if math.isfinite(value) else {"f": struct.pack("<d", value).hex()}


def _complex(value: complex, path: Path, tensor: Save) -> Encoded:
    return {"c": struct.pack("<dd", value.real, value.imag).hex()}


def _bytes(value: bytes, path: Path, tensor: Save) -> Encoded:
    return {"b": _data(value, path, tensor)}


def _data(value: bytes, path: Path, tensor: Save) -> Encoded:
    if len(value) <= INLINE:
        return b64encode(value).decode()
    return tensor(path, torch.frombuffer(bytearray(value), dtype=torch.uint8))


def _list(value: list[Any], path: Path, tensor: Save) -> Encoded:
    return _numbers(value, path, tensor) or [
        _encode(item, f"{path}.{i}", tensor) for i, item in enumerate(value)
    ]


def _tuple(value: tuple[Any, ...], path: Path, tensor: Save) -> Encoded:
    return {"t": _list(list(value), path, tensor)}


def _numbers(value: list[Any], path: Path, tensor: Save) -> Encoded:
    """A long list of only ints or only floats (an order of samples) as one tensor, else None."""
    if len(value) <= MANY:
        return None
    kinds = set(map(type, value))
    if kinds != {int} and kinds != {float}:
        return None
    tag, code = ("ints", "q") if kinds == {int} else ("floats", "d")
    try:
        packed = array(code, value)
    except OverflowError:
        return None
    return {tag: tensor(path, torch.frombuffer(packed, dtype=torch.uint8).clone())}


def _dict(value: Mapping[Any, Any], path: Path, tensor: Save) -> Encoded:
    if all(type(key) is str for key in value):
        return {"d": {k: _encode(v, f"{path}.{k}", tensor) for k, v in value.items()}}
    return {"m": _pairs(value, path, tensor)}


def _pairs(value: Mapping[Any, Any], path: Path, tensor: Save) -> Encoded:
    return [
        [_encode(k, f"{path}.<key {k!r:.40}>", tensor), _encode(v, f"{path}.{k!s:.80}", tensor)]
        for k, v in value.items()
    ]


def _defaultdict(value: defaultdict[Any, Any], path: Path, tensor: Save) -> Encoded:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and FACTORIES.get(name) is not factory:
        raise TypeError(f"{path}: a defaultdict of {factory!r} cannot be saved; use a dict")
    return {"dd": [name, _pairs(value, path, tensor)]}


def _deque(value: deque[Any], path: Path, tensor: Save) -> Encoded:
    return {"deque": [value.maxlen, _list(list(value), path, tensor)]}


def _set(value: set[Any] | frozenset[Any], path: Path, tensor: Save) -> Encoded:
    tag = "s" if type(value) is set else "fs"
    return {tag: [_encode(item, f"{path}.<in set>", tensor) for item in value]}


def _encode_numpy(value: Any, path: Path, tensor: Save) -> Encoded:
    if value.dtype.kind not in "biufcSUmM":
        raise TypeError(f"{path}: numpy's type {value.dtype} cannot be saved")
    tag = "nd" if value.ndim or not isinstance(value, sys.modules["numpy"].generic) else "np"
    return {tag: [value.dtype.str, list(value.shape), _data(value.tobytes(), path, tensor)]}


_ENCODERS: Mapping[type, Callable[[Any, Path, Save], Encoded]] = {
    int: _int,
    float: _float,
    complex: _complex,
    bytes: _bytes,
    bytearray: lambda v, path, tensor: {"ba": _data(bytes(v), path, tensor)},
    list: _list,
    tuple: _tuple,
    dict: _dict,
    OrderedDict: lambda v, path, tensor: {"od": _pairs(v, path, tensor)},
    Counter: lambda v, path, tensor: {"counter": _pairs(v, path, tensor)},
    defaultdict: _defaultdict,
    deque: _deque,
    set: _set,
    frozenset: _set,
    range: lambda v, path, tensor: {"range": [v.start, v.stop, v.step]},
    torch.Size: lambda v, path, tensor: {"size": list(v)},
    torch.dtype: lambda v, path, tensor: {"dtype": dtype_name(v)},
    torch.device: lambda v, path, tensor: {"device": str(v)},
}


def decode(encoded: Encoded, tensor: Callable[[TensorRef], Any]) -> Any:
    """Return the value that was encoded; ``tensor`` returns the tensor of each reference.

    Raises ValueError for what is no encoded value.
    """
    try:
        return _decode(encoded, tensor)
    except (TypeError, KeyError, AttributeError, struct.error, RecursionError) as err:
        raise ValueError(f"not a value of a snapshot: {type(err).__name__}: {err}") from err


def _decode(encoded: Encoded, tensor: Callable[[TensorRef], Any]) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((tag, body),) = encoded.items()
    if tag == "T":
        return tensor(_decode_ref(body))
    if tag == "d":
        return {k: _decode(v, tensor) for k, v in body.items()}
    if tag in ("m", "od", "counter"):
        kind: Any = {"m": dict, "od": OrderedDict, "counter": Counter}[tag]
        return kind(_decode_pairs(body, tensor))
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise ValueError(f"{tag!r} is no value that this version knows")
    return decoder(body, tensor)


def _decode_pairs(body: Encoded, tensor: Callable[[TensorRef], Any]) -> dict[Any, Any]:
    return {_decode(k, tensor): _decode(v, tensor) for k, v in body}


def _bytes_of(body: Encoded, tensor: Callable[[TensorRef], Any]) -> bytes:
    if isinstance(body, str):
        return b64decode(body, validate=True)
    whole = _decode(body, tensor).cpu().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def _decode_numpy(body: Encoded, tensor: Callable[[TensorRef], Any], tag: str) -> Any:
    import numpy

    name, shape, data = body
    dtype = numpy.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"a numpy array of objects ({name}) is not read")
    whole = numpy.ndarray(shape, dtype, bytearray(_bytes_of(data, tensor)))
    return whole if tag == "nd" else whole[()]


def _decode_device(body: Encoded, tensor: Callable[[TensorRef], Any]) -> torch.device:
    try:
        return torch.device(body)
    except RuntimeError as err:
        raise ValueError(str(err)) from None


def _decode_enum(body: Encoded, tensor: Callable[[TensorRef], Any]) -> enum.Enum:
    module, qualname, name = body
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        raise ValueError(f"{module}.{qualname} is no Enum here; import it before resuming")
    return found[name]


def _numbers_of(body: Encoded, tensor: Callable[[TensorRef], Any], code: str) -> list[Any]:
    whole = array(code)
    whole.frombytes(_bytes_of(body, tensor))
    return whole.tolist()


_DECODERS: Mapping[str, Callable[[Encoded, Callable[[TensorRef], Any]], Any]] = {
    "i": lambda body, tensor: int(body, 16),
    "f": lambda body, tensor: struct.unpack("<d", bytes.fromhex(body))[0],
    "c": lambda body, tensor: complex(*struct.unpack("<dd", bytes.fromhex(body))),
    "b": _bytes_of,
    "ba": lambda body, tensor: bytearray(_bytes_of(body, tensor)),
    "t": lambda body, tensor: tuple(_decode(body, tensor)),
    "dd": lambda body, tensor: defaultdict(
        None if body[0] is None else FACTORIES[body[0]], _decode_pairs(body[1], tensor)
    ),
    "deque": lambda body, tensor: deque(_decode(body[1], tensor), body[0]),
    "s": lambda body, tensor: set(_decode(body, tensor)),
    "fs": lambda body, tensor: frozenset(_decode(body, tensor)),
    "range": lambda body, tensor: range(*body),
    "size": lambda body, tensor: torch.Size(body),
    "dtype": lambda body, tensor: dtype_of(body),
    "device": _decode_device,
    "np": lambda body, tensor: _decode_numpy(body, tensor, "np"),
    "nd": lambda body, tensor: _decode_numpy(body, tensor, "nd"),
    "enum": _decode_enum,
    "ints": lambda body, tensor: _numbers_of(body, tensor, "q"),
    "floats": lambda body, tensor: _numbers_of(body, tensor, "d"),
}
