"""Variables of the script that held what was given to the Checkpointer, and hold another now.

``extra={"best": best}`` hands over a value, not the variable. A script that counts on in its
variable has the start's value saved for ever; so has one that binds another dict, scheduler or
loader to it. The frames that call the Checkpointer show the variables: they are only read.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

DEPTH = 30  # callers that are looked at
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
_COUNTED = (int, float, complex)


class _Variable(NamedTuple):
    """The place where a value was found: a variable, or an attribute or item of one."""

    where: CodeType | int
    """The function's code; of a module, the identity of its globals."""
    name: str
    part: str
    """Name of the attribute or item; "" for the variable itself."""
    holder: weakref.ref[Any] | None = None
    """The object that has the attribute, in whatever variable it is."""

    @property
    def shown(self) -> str:
        return f"{self.name}.{self.part}" if self.part else self.name


class Variables:
    """The variables of what was given. Raises nothing."""

    def __init__(self, given: Mapping[str, Any], frame: FrameType | None) -> None:
        """``given``: by names as messages have them; ``frame``: the caller's."""
        self._given = {k: v for k, v in given.items() if isinstance(v, _IMMUTABLE)}
        self._found: dict[str, list[_Variable]] = {}
        self._looked = False
        for namespace, where in _namespaces(frame):
            with namespace as values:
                for name, value in list(values.items()):
                    self._note(given, name, value, _Variable(where, name, ""))
                    holder = _weak(value)
                    for part, held in _parts(value):
                        self._note(given, part, held, _Variable(where, name, part, holder))
        for key in self._given.keys() & self._found.keys():
            exact = [each for each in self._found[key] if _short(key) in (each.name, each.part)]
            self._found[key] = exact or self._found[key]

    def _note(self, given: Mapping[str, Any], called: str, value: Any, at: _Variable) -> None:
        for key, each in given.items():
            plain = key in self._given
            if _alike(key, called, value, each) if plain else value is each:
                self._found.setdefault(key, []).append(at)

    def changed(
        self, now: Mapping[str, Any], frame: FrameType | None
    ) -> Iterator[tuple[str, str, bool]]:
        """Yield name, variable, and whether it is an object, of what the script has replaced.

        ``now``: what will be saved by these names, of all that the script did not set itself.
        """
        if not self._looked:
            self._looked = True
            self._look_at_caller(now, frame)
        wanted = {key: at for key, at in self._found.items() if key in now}
        others: dict[str, list[str]] = {}
        same: set[str] = set()

        def look(key: str, each: _Variable, value: Any) -> None:
            if self._is_other(key, now[key], value):
                others.setdefault(key, []).append(each.shown)
            elif key not in self._given:
                same.add(key)  # the script still has the object that is saved

        for key, variables in wanted.items():
            for each in variables:
                if each.holder is not None and (holder := each.holder()) is not None:
                    look(key, each, vars(holder).get(each.part))
        own = [
            (key, each)
            for key, at in wanted.items()
            for each in at
            if each.holder is None or each.holder() is None
        ]
        for namespace, where in _namespaces(frame) if own else ():
            here = [(key, each) for key, each in own if _is_of(each, where)]
            if not here:
                continue  # to read a function's variables is to make a dict of all of them
            with namespace as values:
                for key, each in here:
                    if each.name in values:
                        look(key, each, _value_of(each, values))
        for key, shown in others.items():
            if key not in same:
                yield key, shown[0], key not in self._given

    def _look_at_caller(self, now: Mapping[str, Any], frame: FrameType | None) -> None:
        """Note variables of the function that calls save(), if they have a value's very name."""
        if frame is None or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        with _locals_of(frame) as values:
            for key in now.keys() & self._given.keys() - self._found.keys():
                kind = type(values.get(_short(key)))
                if kind in _COUNTED and kind is type(self._given[key]):
                    self._found[key] = [_Variable(frame.f_code, _short(key), "")]

    def _is_other(self, key: str, saved: Any, value: Any) -> bool:
        if value is saved or value is None:
            return False
        if key not in self._given:
            one, other = type(value), type(saved)
            return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
        return _differ(value, saved) and _differ(value, self._given[key])


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _alike(key: str, called: str, value: Any, given: Any) -> bool:
    """True if a variable has this value and a name like the one it was given by."""
    if type(value) is not type(given) or _differ(value, given):
        return False
    one, other = _short(key).lower(), called.lower().strip("_")
    return one == other or (min(len(one), len(other)) > 2 and (one in other or other in one))


def _differ(one: Any, other: Any) -> bool:
    try:
        return bool(one != other) and not (one != one and other != other)
    except Exception:  # noqa: BLE001 - the script's own __ne__; arrays have no truth
        return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes of a plain object, and items of a dict, by name."""
    kind = type(value)
    if kind is dict:
        held: Any = value if len(value) < 200 else {}
    elif kind.__module__.partition(".")[0] in ("torch", "numpy", "builtins", "robust_slurm"):
        return
    else:
        held = getattr(value, "__dict__", {}) if not isinstance(value, type(sys)) else {}
    if isinstance(held, dict):
        yield from ((k, v) for k, v in list(held.items()) if type(k) is str)


def _value_of(variable: _Variable, values: Mapping[str, Any]) -> Any:
    value = values[variable.name]
    if not variable.part:
        return value
    # Of another object, where the script has replaced the first one.
    held = value if type(value) is dict else getattr(value, "__dict__", {})
    return held.get(variable.part)


def _weak(value: Any) -> weakref.ref[Any] | None:
    """Return a weak reference to an object with attributes; None for a dict."""
    try:
        return weakref.ref(value) if type(value) is not dict and vars(value) is not None else None
    except TypeError:
        return None


def _is_of(variable: _Variable, where: CodeType | int) -> bool:
    if variable.where == where:
        return True
    # A function within it that goes on with the same variable.
    both = isinstance(where, CodeType) and isinstance(variable.where, CodeType)
    return both and variable.name in where.co_freevars  # type: ignore[union-attr]


def _namespaces(frame: FrameType | None) -> Iterator[tuple[Any, CodeType | int]]:
    """Yield the variables of a frame and its callers, and those of their modules, once each."""
    seen: set[int] = set()
    for _ in range(DEPTH):
        if frame is None:
            return
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            yield _locals_of(frame), frame.f_code
        if id(frame.f_globals) not in seen:
            seen.add(id(frame.f_globals))
            yield _globals_of(frame), id(frame.f_globals)
        frame = frame.f_back


@contextmanager
def _globals_of(frame: FrameType) -> Iterator[Mapping[str, Any]]:
    yield frame.f_globals


@contextmanager
def _locals_of(frame: FrameType) -> Iterator[Mapping[str, Any]]:
    """The local variables of a running function, of which no reference stays behind."""
    values = frame.f_locals
    try:
        yield values
    finally:
        # Before Python 3.13 the frame keeps this dict, and with it a step's tensors.
        if sys.version_info < (3, 13) and sys.getrefcount(values) <= 4:
            values.clear()
