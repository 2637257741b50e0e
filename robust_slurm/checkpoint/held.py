"""A value of the script's own, saved and restored by two functions.

A number or a string cannot be restored in place, and a Checkpointer sees no variable of a script.
``held`` hands it over: ``get`` reads it at each save(), ``put`` sets it in resume().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class HeldValue:
    """An object with a state that is made of two functions."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._get, self._put = get, put

    def state_dict(self) -> Any:
        """Return what ``get`` returns."""
        return self._get()

    def load_state_dict(self, state: Any) -> None:
        """Call ``put`` with what was saved."""
        self._put(state)


def held(get: Callable[[], Any], put: Callable[[Any], object]) -> HeldValue:
    """Return an object for ``extra=`` that saves what ``get()`` returns and restores by ``put``.

    ::

        best = {"loss": math.inf}
        extra={"best": robust_slurm.held(lambda: best["loss"], lambda v: best.update(loss=v))}

    ``get`` may return numbers, strings, tensors, arrays, and lists and dicts of them. Raises
    TypeError if one of the two is no function.
    """
    for name, function in (("get", get), ("put", put)):
        if not callable(function):
            raise TypeError(
                f"held({name}=...): a function, such as `lambda: best`, not {function!r:.60}"
            )
    return HeldValue(get, put)
