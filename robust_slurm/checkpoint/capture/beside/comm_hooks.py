"""The state of DistributedDataParallel's communication hooks, which no state_dict() has.

PowerSGD keeps the error of its compression, its factors and a generator, post-local SGD counts
iterations: without them the gradients after a restart would be others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import nn

from .. import module_tree
from ..assembly import Assembly, StateError, Step
from ..leaves import Leaf
from ..values import Encoded
from .attributes import Attributes, has_attributes

KEY = "comm_hooks"
SETTLED = 4
"""Steps after which DDP's buckets stay as they are."""
_DDP = nn.parallel.DistributedDataParallel


def hook_states(models: Iterable[Any]) -> Iterator[Any]:
    """Yield what these models' communication hooks may keep state in, each once."""
    known: set[int] = set()
    for model in models:
        for _, _, module in module_tree.walk(model) if isinstance(model, nn.Module) else ():
            for hook, state in getattr(module, "_comm_hooks", ()):
                for found in (state, getattr(hook, "__self__", None)):
                    held = isinstance(found, dict | list) or has_attributes(found)
                    if held and not isinstance(found, nn.Module) and id(found) not in known:
                        known.add(id(found))
                        yield found


class CommHooks:
    """The hooks of all models: each rank's own, as each has its own gradients."""

    def __init__(
        self, models: Iterable[nn.Module], make: Callable[[str, Any], Any],
        saved: Callable[[], Collection[int]],
    ) -> None:  # fmt: skip
        """``make`` and ``saved``: see Attributes."""
        self.key = KEY
        self._models = list(models)
        self._states = list(hook_states(self._models))
        parameters = [p for model in self._models for p in model.parameters()]
        self._held = [
            Attributes(
                f"{KEY}.{i}",
                SimpleNamespace(state=state) if isinstance(state, dict | list) else state,
                make, saved=saved, parameters=lambda: parameters,
            )
            for i, state in enumerate(self._states)
        ]  # fmt: skip
        self._late = False
        self._asked = 0
        self._divided: list[list[list[int]]] = []
        self.note = ""
        """Remark on an oddity of the restored state; empty if there is none."""

    @property
    def leaves(self) -> list[list[Leaf]]:
        """The tensors that ``collect`` found."""
        return [part for each in self._held for part in each.leaves]

    def remarks(self) -> list[str]:
        """Return what ``collect`` found that cannot be saved, each once."""
        found = [text for each in self._held for text in each.notes()]
        if not self._late and len(list(hook_states(self._models))) > len(self._states):
            self._late = True
            found.append(
                "a communication hook of the model was registered after the Checkpointer was made: "
                "its state is not saved. Call register_comm_hook() before"
            )
        return found

    def collect(self) -> Encoded:
        """Find the tensors (``leaves``), and return all else, encoded."""
        states = [each.collect() for each in self._held]
        later = [_is_yet_to_divide(each) for each in self._parallel()]
        return {"d": {"states": states, "buckets": self._buckets(), "later": later}}

    def _parallel(self) -> list[Any]:
        places = (place.module for model in self._models for place in module_tree.walk(model))
        return [each for each in places if isinstance(each, _DDP)]

    def _buckets(self) -> list[list[list[int]]]:
        """Return how each model divides its gradients: the numbers of the parameters, by bucket.

        It does so anew once, after its first backward pass, so it is asked at the first steps only:
        an answer takes as much memory as the gradients for a moment."""
        if self._asked < SETTLED:
            self._asked += 1
            self._divided = [_buckets_of(each) for each in self._parallel()]
        return self._divided

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Return the steps that restore them. Raises StateError."""
        body = encoded.get("d") if isinstance(encoded, dict) else None
        states = body.get("states") if isinstance(body, dict) else None
        if body is None or not isinstance(states, list) or len(states) != len(self._held):
            raise StateError(f"{self.key}: saved with another number of communication hooks")
        pairs = zip(self._held, states, strict=True)
        steps = [step for each, part in pairs for step in each.plan(saved, part)]
        self.note = ""
        has_tensors = any(e.fqn.startswith(f"{self.key}.") for e in saved.own.entries)
        return [*steps, partial(self._compare, body, has_tensors)]

    def _compare(self, body: dict[str, Any], has_tensors: bool) -> None:
        """Note if the first step divides the gradients otherwise, and a restored state minds."""
        models = self._parallel()
        late = any(each.static_graph for each in models)  # they divide anew a pass later
        if not has_tensors and not any(_begins_to_compress(each, late) for each in self._states):
            return
        later = map(_is_yet_to_divide, models)
        anew = any(here and there for here, there in zip(later, body.get("later", ())))  # noqa: B905
        if anew or body.get("buckets") != self._buckets():
            self.note = (
                "the state of the model's communication hook (PowerSGD's errors of compression) is "
                "restored, but DDP puts gradients into other buckets until its first backward pass "
                "is over, so the first step compresses them in another order. Make a forward and "
                "backward pass and one more forward pass before resume()"
            )


def _begins_to_compress(state: Any, late: bool) -> bool:
    """True for PowerSGD from the step on whose errors it keeps; ``late``: from the one before."""
    start = getattr(state, "start_powerSGD_iter", None)
    return start is not None and bool(state.iter + late >= start)


def _is_yet_to_divide(model: Any) -> bool:
    """True if DDP will put gradients into other buckets after its first backward pass."""
    ever = model.static_graph or not model.find_unused_parameters
    return ever and not getattr(model, "_has_rebuilt_buckets", True)


def _buckets_of(model: Any) -> list[list[int]]:
    numbers = {id(each): n for n, each in enumerate(model.parameters())}
    found = model.reducer._get_zeros_like_grad_buckets()
    return [[numbers.get(id(p), -1) for p in bucket.parameters()] for bucket in found]
