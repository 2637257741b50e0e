"""Random generators of torchdata's worker processes, saved with each batch and restored.

torchdata seeds a worker once and saves only its dataset's state. What a worker draws (random
augmentation) would begin anew after a restart. So its generators travel with the dataset's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from .. import rng
from .generators import LoaderGenerators, forget_restored, process_state, same

RANDOM, DATASET = "robust_slurm_random", "dataset"
_WORKERS, _SNAPSHOT = "_worker_snapshots", "_snapshot"
_DATASET_STATE, _FETCHER_STATE, _ITER_STATE = "dataset_state", "fetcher_state", "dataset_iter_state"


def initialise(states: Mapping[int, Any], inner: Callable[[int], Any] | None, worker: int) -> None:
    """Run in a new worker, as its ``worker_init_fn``: have its states hold its generators.

    ``states``: by worker, from ``taken_out``; ``inner``: the script's own ``worker_init_fn``.
    """
    from torchdata.stateful_dataloader import worker as module

    if inner is not None:
        inner(worker)
    module._make_state_dict = _Recorder(states.get(worker), module._make_state_dict)


class _Recorder:
    """Takes the place of torchdata's ``_make_state_dict`` in a worker."""

    def __init__(self, restored: Mapping[str, Any] | None, inner: Callable[..., Any]) -> None:
        self._restored, self._inner = restored, inner
        self._fetcher: object = None
        self._begun: Any = None

    def __call__(self, worker: int, kind: Any, fetcher: Any, dataset: Any) -> dict[str, Any]:
        state: dict[str, Any] = self._inner(worker, kind, fetcher, dataset)
        if fetcher is not self._fetcher:  # a pass begins
            self._fetcher = fetcher
            self._source = LoaderGenerators(fetcher)
            if self._restored is not None:
                _put(self._source, self._restored["now"])
                self._begun, self._restored = self._restored["begun"], None
            else:
                forget_restored(fetcher.dataset)
                self._begun = _now(self._source)
        held = {"now": _now(self._source), "begun": self._begun}
        return {**state, _DATASET_STATE: {RANDOM: held, DATASET: state[_DATASET_STATE]}}


def _now(source: LoaderGenerators) -> dict[str, Any]:
    # Arrays, not tensors: each tensor in a queue takes a file descriptor.
    own = {path: _as_array(each) for path, each in source.own().items()}
    return {"process": {k: _as_array(v) for k, v in process_state().items()}, "own": own}


def _as_array(state: Any) -> Any:
    return state.numpy() if isinstance(state, torch.Tensor) else state


def _as_tensor(state: Any) -> Any:
    numpy_array = hasattr(state, "tobytes") and hasattr(state, "shape")
    return torch.tensor(state) if numpy_array else state


def _put(source: LoaderGenerators, state: Mapping[str, Any]) -> None:
    rng.restore({k: _as_tensor(v) for k, v in state["process"].items()})
    source.put_own({k: _as_tensor(v) for k, v in state["own"].items()})


def taken_out(state: dict[str, Any]) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return a loader's state as torchdata knows it, and the generators' states by worker."""
    snapshot = state.get(_SNAPSHOT)
    workers = snapshot.get(_WORKERS) if isinstance(snapshot, dict) else None
    if not isinstance(snapshot, dict) or not isinstance(workers, dict):
        return state, {}
    found: dict[int, Any] = {}
    plain = {}
    for name, each in workers.items():
        held = each.get(_DATASET_STATE) if isinstance(each, dict) else None
        if isinstance(held, dict) and RANDOM in held:
            each = {**each, _DATASET_STATE: held.get(DATASET)}
            found[int(name.rpartition("_")[2])] = _to_restore(held[RANDOM], each)
        plain[name] = each
    return {**state, _SNAPSHOT: {**snapshot, _WORKERS: plain}}, found


def draws(state: dict[str, Any]) -> bool:
    """True if the generators of a worker are not as they were when it began the pass."""
    snapshot = state.get(_SNAPSHOT)
    workers = snapshot.get(_WORKERS) if isinstance(snapshot, dict) else None
    held = [each[_DATASET_STATE] for each in (workers or {}).values()]
    found = [each[RANDOM] for each in held if isinstance(each, dict) and RANDOM in each]
    return any(not same(each["now"], each["begun"]) for each in found)


def _to_restore(held: dict[str, Any], worker: Mapping[str, Any]) -> dict[str, Any]:
    """A stream without a state is read from its beginning: so are its random numbers."""
    fetcher = worker.get(_FETCHER_STATE)
    anew = (
        fetcher is not None and worker[_DATASET_STATE] is None and fetcher.get(_ITER_STATE) is None
    )
    return {**held, "now": held["begun"]} if anew else held


def wrapped(states: Mapping[int, Any], inner: Callable[[int], Any] | None) -> Callable[[int], None]:
    """Return the ``worker_init_fn`` of workers that go on with these states."""
    return partial(initialise, states, inner)
