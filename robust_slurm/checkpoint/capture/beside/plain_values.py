"""Plain values of ``extra``: restored in place if possible; the script must read the others back.

A dict of averaged weights or a list of losses is the script's own object, which it goes on with. A
number cannot be changed in place: if the script does not read it back, it goes on with the number
of its start, and the next save() would overwrite the right one.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ...copying.watch import same_bits
from ..leaves import local_part

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
_FEW = 32  # items of a dict that are compared with variables of the script
_SETTINGS = re.compile("conf|cfg|arg|param|hyper|setting|option|meta", re.IGNORECASE)
"""Names of dicts that hold constants, which a script may have copies of."""
_NONE: Mapping[int, int] = MappingProxyType({})


class Extra(dict[str, Any]):
    """``Checkpointer.extra``: a dict that knows which restored values nobody has read."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.objects: Mapping[str, Any] = {}
        """Objects that are saved, by their keys; of a plain value, its PlainValue."""
        self.unread: set[str] = set()
        """Names of values that ``resume`` replaced by others."""
        self.unseen: set[str] = set()
        """Names of all values that were restored and not read since."""
        self._ours = dict(given)
        """Values as they were given or restored."""
        self._our_items = {name: dict(_items(name, value)) for name, value in given.items()}
        """Plain items of those that are dicts."""

    def restore(self, name: str, saved: Any) -> None:
        """Set a value as it was saved, in place if possible."""
        live = _NONE if _is_plain(saved) else live_storages(self.objects)
        value, same = renewed(self.peek(name), saved, live)
        super().__setitem__(name, value)
        self._ours[name] = value
        self._our_items[name] = dict(_items(name, value))
        self.unseen.add(name)
        if not same:
            self.unread.add(name)

    def peek(self, name: str) -> Any:
        """Return a value without counting that as read."""
        return super().__getitem__(name)

    def by_name(self, objects: Mapping[str, Any], *, untouched: bool = False) -> dict[str, Any]:
        """Return what is saved by the names that messages have, as a variable may hold it.

        ``objects``: model, optimizer and loader. ``untouched``: not what the script has set here.
        """
        found = {k: v for k, v in objects.items() if "." not in k and v is not None}
        for name in super().__iter__():
            value = self.peek(name)
            if not untouched or value is self._ours.get(name, self):
                found[f"extra.{name}"] = value
                ours = self._our_items.get(name, {})
                for key, each in _items(name, value):
                    if not untouched or (key in ours and each == ours[key]):
                        found[f"extra.{name}.{key}"] = each
        return found

    def check(self, now: object) -> list[str]:
        """Return what is wrong as save() begins. ``now``: the Checkpointer's ``extra``."""
        found = []
        if now is not self:
            found.append(
                "ckpt.extra was replaced by another dict, which is not saved: set its values one "
                "by one"
            )
        for name in sorted(self.unread):
            found.append(
                f"extra.{name} was restored, and the script has not read it since resume(): a "
                f"value of its own is still that of its start. Use ckpt.extra[{name!r}]"
            )
        self.unread.clear()
        for name in super().__iter__():
            saved = self.objects.get(f"extra.{name}", self)
            if not isinstance(saved, PlainValue) and saved is not self.peek(name):
                found.append(
                    f"extra.{name} was set after the Checkpointer was made, and is not saved: pass "
                    "it in extra= when the Checkpointer is made"
                )
        return found

    def _see(self, name: str) -> None:
        self.unread.discard(name)
        self.unseen.discard(name)

    def _see_all(self) -> None:
        self.unread.clear()
        self.unseen.clear()

    def __getitem__(self, name: str) -> Any:
        self._see(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._see(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._see(name)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._see(name)
        return super().setdefault(name, default)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> Any:  # a script that pickles it wants no model with it
        return dict, (self.copy(),)

    def __iter__(self) -> Iterator[str]:  # dict(extra) and **extra read by these
        self._see_all()
        return super().__iter__()

    def items(self) -> Any:
        self._see_all()
        return super().items()

    def values(self) -> Any:
        self._see_all()
        return super().values()


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plain items of a small dict that holds no settings."""
    if type(value) is dict and len(value) <= _FEW and not _SETTINGS.search(name):
        yield from ((k, v) for k, v in value.items() if type(k) is str and type(v) in _PLAIN)


class PlainValue:
    """A value of ``extra``, as an object with a state."""

    def __init__(self, values: Extra, name: str) -> None:
        self._values, self._name = values, name

    def state_dict(self) -> Any:
        return self._values.peek(self._name)

    def load_state_dict(self, state: Any) -> None:
        self._values.restore(self._name, state)

    def was_read(self) -> bool:
        """Return True if the script has read it since it was restored."""
        return self._name not in self._values.unseen


def live_storages(found: Any) -> dict[int, int]:
    """Return address and bytes of the storages of all models and optimizers among some objects."""
    tensors: list[Any] = []
    if isinstance(found, Mapping | list | tuple):
        live: dict[int, int] = {}
        for part in found.values() if isinstance(found, Mapping) else found:
            live |= live_storages(part)
        return live
    if isinstance(found, torch.nn.Module):
        tensors = [*found.parameters(), *found.buffers()]
    elif hasattr(found, "param_groups"):
        tensors = [p for group in found.param_groups for p in group["params"]]
        for part in getattr(found, "state", {}).values():
            tensors += part.values() if isinstance(part, Mapping) else ()
    local = (local_part(each) for each in tensors if isinstance(each, torch.Tensor))
    storages = (each.untyped_storage() for each in local)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def renewed(here: Any, saved: Any, live: Mapping[int, int] = _NONE) -> tuple[Any, bool]:
    """Return the object that holds ``saved`` now, and True if holders of ``here`` see the value.

    Tensors, arrays and containers of the same type are written to; all else is replaced. Tensors
    and arrays in ``live`` storages are replaced too: a script may have put the model's own weights
    into extra (``model.state_dict()``), and later a copy of better ones in their place, which must
    not overwrite the model's.
    """
    numpy = sys.modules.get("numpy")
    if isinstance(here, torch.Tensor):
        return _into_tensor(here, saved, live)
    if numpy is not None and isinstance(here, numpy.ndarray):
        is_array = type(saved) is numpy.ndarray and here.flags.writeable
        if is_array and (saved.dtype, saved.shape) == (here.dtype, here.shape):
            if _lies_in(here.ctypes.data, live):
                return (here, True) if saved.tobytes() == here.tobytes() else (saved, False)
            here[...] = saved
            return here, True
        return saved, False
    kind = type(here)
    if kind is not type(saved):
        return saved, False
    if kind in _DICTS:
        new = {
            key: value
            if _is_plain(value) or key not in here
            else renewed(here[key], value, live)[0]
            for key, value in saved.items()
        }
        here.clear()
        here.update(new)
    elif kind is list:
        pairs = zip(here, saved, strict=False)
        first = [b if _is_plain(b) else renewed(a, b, live)[0] for a, b in pairs]
        here[:] = first + saved[len(here) :]
    elif kind is deque and here.maxlen == saved.maxlen:
        here.clear()
        here.extend(saved)
    elif kind is set:
        here.clear()
        here.update(saved)
    elif kind is bytearray:
        here[:] = saved
    elif kind is tuple and len(here) == len(saved):
        found = [renewed(*pair, live) for pair in zip(here, saved, strict=True)]
        return tuple(value for value, _ in found), all(same for _, same in found)
    elif kind is frozenset:
        return saved, here == saved  # in any order
    else:
        return saved, repr(here) == repr(saved)
    return here, True


def _is_plain(value: Any) -> bool:
    """True for most of what is never written to: there may be millions in a list."""
    return type(value) in _PLAIN


def _lies_in(address: int, live: Mapping[int, int]) -> bool:
    return any(begin <= address < begin + size for begin, size in live.items())


def _into_tensor(here: torch.Tensor, saved: Any, live: Mapping[int, int]) -> tuple[Any, bool]:
    fits = isinstance(saved, torch.Tensor)
    fits = fits and (saved.dtype, saved.shape) == (here.dtype, here.shape)
    if fits and local_part(here) is here and here.layout is torch.strided:
        if here.untyped_storage().data_ptr() in live:
            unchanged = same_bits(saved.cpu(), here)
            return (here, True) if unchanged else (saved, False)
        try:
            with torch.no_grad():
                here.copy_(saved)
            return here, True
        except RuntimeError:  # it overlaps itself, or was made in inference mode
            pass
    return saved, False
