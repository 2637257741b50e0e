"""The tensors of a state: what is saved of each, found again from step to step without work.

A ``Leaf`` is made once for a tensor and used again as long as the same tensor object lies at the
same address in the same shape: then all that a snapshot says of it is still true.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import NamedTuple

import torch

from ..format.dtypes import NAME, dtype_name, storable
from ..format.layout import Entry
from . import shards
from .values import Encoded, TensorRef, encode_ref


class Item(NamedTuple):
    """One tensor to copy into a snapshot."""

    entry: Entry
    tensor: torch.Tensor
    """The value, of the entry's shape and type; detached, on any device, maybe not contiguous."""
    late: bool
    """True if only the optimizer's step changes it: it may be copied until the next one."""
    frozen: bool = False
    """True if it is not meant to be trained. A hint for the layout: nothing may rely on it."""


class Memory(NamedTuple):
    """Place of a tensor in memory."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]


COPIED = -1
"""Address of a tensor whose conjugate or negative bit was resolved into a copy: it is never taken
for another one, nor for itself at a later step."""


class Leaf(NamedTuple):
    """A tensor that was found in a state."""

    found: torch.Tensor
    """The object itself: a parameter, a DTensor."""
    local: torch.Tensor
    """This rank's part of it, the same object for a tensor that is not distributed."""
    plain: torch.Tensor
    """An alias of ``local`` as it was when the leaf was made: it keeps the memory."""
    memory: Memory
    """The memory of ``local`` when the leaf was made."""
    shareable: bool
    """Data-parallel peers may hold the same and each keep a part."""
    item: Item
    """All of it that this rank holds."""
    encoded: Encoded
    """The stand-in among the values."""

    def unchanged(self, tensor: torch.Tensor) -> bool:
        """True if all that this leaf says holds for ``tensor`` now."""
        return (
            self.found is tensor
            and local_part(tensor) is self.local
            and memory_of(self.local) == self.memory
            and self.local.dtype == self.plain.dtype
            and self.local.is_conj() == self.plain.is_conj()
            and is_frozen(tensor) == self.item.frozen
        )


def is_frozen(tensor: torch.Tensor) -> bool:
    """True for a parameter that is not trained."""
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the place of a tensor in memory now."""
    return Memory(tensor.data_ptr(), tensor.shape, tensor.stride())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, as the same object every time."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


class Leaves:
    """The leaves of one part of the state, in the order in which they were found.

    The same memory found twice (tied parameters) is one leaf.
    """

    def __init__(self, prefix: str, *, late: bool, shareable: bool) -> None:
        self.prefix = prefix
        self.late = late
        self.shareable = shareable
        self.found: list[Leaf] = []
        self._seen: dict[tuple[object, ...], Leaf] = {}
        self._names: set[str] = set()
        self._last: dict[str, Leaf] = {}
        self._before: list[Leaf] = []

    def begin(self) -> None:
        """Start over; what was found last time serves again where nothing changed."""
        self._before = self.found
        self._last = {leaf.item.entry.fqn: leaf for leaf in self.found}
        self.found = []
        self._seen = {}
        self._names = set()

    def end(self) -> None:
        """End the search. If all leaves are those of last time, ``found`` is the same list too."""
        if len(self.found) == len(self._before) and all(map(is_, self.found, self._before)):
            self.found = self._before
        self._before, self._last = [], {}  # they would keep memory that is no longer used

    def add(self, path: str, tensor: torch.Tensor, *, own: bool = False) -> Encoded:
        """Note a tensor at a dotted path below the prefix. Return its stand-in among the values.

        ``own``: this one is not shareable, whatever the others are.

        Raises TypeError for one that cannot be saved.
        """
        name = self._unique(f"{self.prefix}.{path}" if path else self.prefix)
        last = self._last.get(name)
        if last is not None and last.unchanged(tensor):
            leaf = last
        else:
            leaf = make_leaf(name, tensor, late=self.late, shareable=self.shareable and not own)
        key: tuple[object, ...] = (*leaf.memory, leaf.local.dtype, leaf.local is leaf.found)
        if not leaf.item.tensor.numel():  # it has no memory: a shard of a tied weight, maybe
            key = (id(leaf.found),)
        if leaf.memory.address != COPIED:
            same = self._seen.setdefault(key, leaf)
            if same is not leaf:
                self._names.discard(name)
                return same.encoded
        self.found.append(leaf)
        return leaf.encoded

    def _unique(self, name: str) -> str:
        plain, n = name, 1
        while name in self._names:
            n += 1
            name = f"{plain}~{n}"
        self._names.add(name)
        return name


_IS_SET_TO = torch.Tensor.is_set_to  # the same memory, offset, shape and strides, in one call
_DTYPE, _LOCAL = attrgetter("dtype"), attrgetter("_local_tensor")
_TRAINED = attrgetter("requires_grad")
_DEVICES = ("cpu", "cuda", "mps")  # where torch has is_set_to


class Batch:
    """Many leaves, checked together in a tenth of the time.

    Most of the time goes into cache misses, so each tensor is touched as little as possible.
    """

    def __init__(self, leaves: Iterable[Leaf]) -> None:
        kept = list(leaves)
        self._others = [
            leaf
            for leaf in kept
            if leaf.local.is_complex() or leaf.local.device.type not in _DEVICES
        ]
        others = set(map(id, self._others))
        quick = [leaf for leaf in kept if id(leaf) not in others]
        self._locals = [leaf.local for leaf in quick]
        self._plain = [leaf.plain for leaf in quick]
        self._dtypes = [leaf.plain.dtype for leaf in quick]
        self._found = [leaf.found for leaf in quick if isinstance(leaf.found, torch.nn.Parameter)]
        self._trained = [found.requires_grad for found in self._found]
        distributed = [leaf for leaf in quick if leaf.local is not leaf.found]
        self._distributed = [leaf.found for leaf in distributed]
        self._parts = [leaf.local for leaf in distributed]

    def unchanged(self) -> bool:
        """True if every tensor still lies where it lay, in the same shape and type."""
        here = self._locals
        return (
            all(map(_IS_SET_TO, here, self._plain))
            and all(map(is_, map(_DTYPE, here), self._dtypes))
            and all(map(is_, map(_TRAINED, self._found), self._trained))
            and all(map(is_, map(_LOCAL, self._distributed), self._parts))
            and all(leaf.unchanged(leaf.found) for leaf in self._others)
        )


def make_leaf(name: str, tensor: torch.Tensor, *, late: bool, shareable: bool) -> Leaf:
    """The leaf of a tensor, saved under ``name``. Raises TypeError for one that cannot be saved."""
    distributed = shards.is_dtensor(tensor)
    if distributed:
        shard = shards.shard_of(tensor)
        local, kind = shard.local, "block" if shard.kind == "block" else "private"
        global_shape, offsets = shard.global_shape, shard.offsets
        shareable = shareable and shard.kind != "private"
        whole = () if shard.kind != "private" else tuple(tensor.shape)
        placed = (shard.placements, shard.mesh, whole)
        _check(name, local)
    else:
        _check(name, tensor)
        local, kind, placed = tensor, "private", ((), (), ())
        global_shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
    plain = local.detach()
    if type(plain) is not torch.Tensor:
        plain = plain.as_subclass(torch.Tensor)
    memory = memory_of(local)
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
        memory = memory._replace(address=COPIED)
    try:
        stored = storable(plain)
    except TypeError as err:
        raise TypeError(f"{name}: {err}") from None
    shape = tuple(stored.shape)
    extra = shape[plain.dim() :]  # real and imaginary part
    entry = Entry(
        name, NAME[stored.dtype], shape, name, global_shape + extra,
        offsets + (0,) * len(extra), kind,
    )  # fmt: skip
    ref = TensorRef(
        name,
        "" if stored.dtype == plain.dtype else dtype_name(plain.dtype),
        "" if plain.is_cpu else plain.device.type,
        dense_stride(plain),
        *placed,
        frozen=is_frozen(tensor),
    )
    item = Item(entry, stored, late, ref.frozen)
    return Leaf(tensor, local, plain, memory, shareable, item, encode_ref(ref))


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor that is dense in another order than rows (channels last), else ()."""
    if tensor.is_contiguous():
        return ()
    kept = torch.empty_like(tensor, device="meta").stride()
    return tuple(kept) if kept == tensor.stride() else ()


def _check(name: str, local: torch.Tensor) -> None:
    kind = type(local)
    if torch.nn.parameter.is_lazy(local):
        why = "it has no shape yet; run the model once before"
    elif hasattr(local, "__tensor_flatten__"):
        why = f"a {kind.__module__}.{kind.__qualname__} is made of several tensors"
    elif local.layout is not torch.strided:
        why = f"its layout is {local.layout}"
    elif local.is_meta:
        why = "it is on the meta device and has no data"
    elif local.is_quantized:
        why = "it is quantized"
    else:
        return
    raise TypeError(f"{name}: this tensor cannot be saved: {why}")
