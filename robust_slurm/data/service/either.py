"""A rank's steps from its node's data process, or made by the rank itself where there is none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from robust_slurm.data.say import say
from robust_slurm.data.service.client import NodeSteps, ProcessGone, code_of, door, expect_code
from robust_slurm.data.service.ring import MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from robust_slurm.data.steps import Steps
    from robust_slurm.resizing.world import TrainingWorld

    Opened = tuple[Steps, tuple[int, ...]]
    """Steps, and the shares of the rank that they are for."""


def steps_of(
    name: str, world: TrainingWorld, own: Callable[[], Opened], memory: int = MEMORY
) -> Opened:
    """Return the steps of the plan ``name`` (module:attribute) for this rank of a world, and the
    rank's shares.

    ``own`` makes steps in this process: outside robust-srun, and when the data process is gone
    for good, with one line on stderr. Raises DataError.
    """
    if not door():
        return own()
    code = code_of(name)

    def own_later() -> Opened:
        if name.partition(":")[0] not in sys.modules:  # it is read only now
            expect_code(name, code)
        return own()

    try:
        node = NodeSteps(name, world, memory, code)
    except ProcessGone as gone:
        _warn(gone)
        return own()
    return _Either(node, own_later), node.shares


class _Either:
    """Steps of the data process; once that is gone for good, the same steps from this process."""

    def __init__(self, node: NodeSteps, own: Callable[[], Opened]) -> None:
        self._steps: Steps = node
        self._own: Callable[[], Opened] | None = own
        self._state: Any = None

    def seek(self, state: Any) -> None:
        self._state = state
        self._do(lambda: self._steps.seek(state))

    def next(self) -> tuple[int, Mapping[int, Mapping[str, Any]], Any]:
        number, rows, self._state = self._do(lambda: self._steps.next())
        return number, rows, self._state

    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = self._do(lambda: self._steps.identity())
        return found

    def close(self) -> None:
        self._steps.close()

    def _do(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ProcessGone as gone:
            assert self._own is not None
            _warn(gone)
            self._steps.close()
            (self._steps, _), self._own = self._own(), None
            self._steps.seek(self._state)
            return call()


def _warn(gone: ProcessGone) -> None:
    say(f"no data process for this rank: {gone}; it prepares its data itself")
