"""The state of a torch module: parameters, buffers, extra state.

``module.state_dict()`` makes a new tensor for each parameter at every call. If nothing in a module
requires that call (no unknown hooks, no overridden methods), its tensors are taken from where they
lie, after a check that the tree of modules is still the one of last time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from . import module_tree
from .assembly import Assembly, StateError, Step
from .leaves import Batch, Leaf, Leaves, Memory, local_part, memory_of
from .module_tree import Shape, TreeModule
from .values import Encoded, TensorRef, decode, encode, ref_of

EXTRA = "_extra_state"  # torch's name for what get_extra_state() returns


class ModuleState:
    """One module among the objects of a checkpoint."""

    def __init__(self, key: str, top: nn.Module, *, trained: bool) -> None:
        """``trained``: only the optimizer changes its parameters, on all peers alike.

        Raises TypeError for a module that cannot be saved.
        """
        if module_tree.is_fsdp1(top):
            raise TypeError(
                f"{key}: FullyShardedDataParallel cannot be saved; use fully_shard (FSDP2)"
            )
        self.key = key
        self.top = top
        self._parameters = Leaves(key, late=trained, shareable=trained)
        self._others = Leaves(key, late=False, shareable=False)
        self._shape = Shape([])
        self._places: list[TreeModule] = []
        self._with_buffers: list[TreeModule] = []
        self._with_extra: list[TreeModule] = []
        self._reshards: list[Callable[[], object]] = []
        self._plain = False
        self._batch = Batch(())
        self._buffers = Batch(())
        self._saved_parameters: dict[str, Encoded] = {}
        self._saved_others: dict[str, Encoded] = {}
        self._encoded: Encoded = None
        self._text = ""  # the others in it, as text
        self.names: dict[torch.Tensor, str] = {}
        """Parameter → its name; another object whenever these changed."""
        self._restored: dict[str, Encoded] = {}
        self.trusting = False
        """``collect`` takes parameters that are the same objects for unchanged."""

    @property
    def leaves(self) -> list[list[Leaf]]:
        """The tensors that ``collect`` found; the same lists as long as they are the same."""
        return [self._parameters.found, self._others.found]

    @property
    def lasting(self) -> list[list[Leaf]]:
        """Those of ``leaves`` that stay the same objects from step to step."""
        return [self._parameters.found]

    def places(self) -> list[TreeModule]:
        """Return the tree of modules, as ``collect`` found it."""
        return self._places or list(module_tree.walk(self.top))

    def collect(self) -> Encoded:
        """Find the tensors (``leaves``), and return all else, encoded."""
        before = self._saved_others
        same = self._same()
        if not same:
            self._look_anew()
        if self._plain and not (same and self._same_others()):
            self._plain = False  # if it fails, all is done anew next time
            self._collect_others()
            self._plain = True
        others = self._saved_others
        # By text: to Python 1, 1.0 and True are equal, and so are 0.0 and -0.0.
        text = self._text if others is before else repr(others)
        if not same or text != self._text:
            self._encoded, self._text = {"d": {**self._saved_parameters, **others}}, text
        return self._encoded

    def _same(self) -> bool:
        """True if all parameters are what and where they were."""
        if not self._plain:
            return False
        for reshard in self._reshards:
            reshard()
        return self._shape.unchanged() and (self.trusting or self._batch.unchanged())

    def _same_others(self) -> bool:
        """True if all buffers are unchanged too, and there is nothing else."""
        return not self._with_extra and self._shape.same_buffers() and self._buffers.unchanged()

    def _look_anew(self) -> None:
        self._plain = False  # if what follows fails, it is done anew next time
        self._places = list(module_tree.walk(self.top))
        plain = module_tree.is_plain_to_save(self.top)
        if plain:
            self._reshards = module_tree.reshards(self._places)
            for reshard in self._reshards:
                reshard()
            self._with_buffers = [place for place in self._places if place.module._buffers]
            self._with_extra = [
                place for place in self._places if module_tree.has_extra_state(place.module)
            ]
            self._collect_parameters()
            self._shape = Shape(self._places)
        else:
            self._ask()
        names = module_tree.parameter_names(self.top)
        if names != self.names:
            self.names = names
        self._plain = plain

    def _collect_parameters(self) -> None:
        self._parameters.begin()
        own = module_tree.not_shared(self.top)
        self._saved_parameters = {
            prefix + name: self._parameters.add(prefix + name, parameter, own=prefix + name in own)
            for prefix, _, module in self._places
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        self._parameters.end()
        self._batch = Batch(self._parameters.found)

    def _ask(self) -> None:
        """Call state_dict(), as it does more than list the tensors."""
        state = self.top.state_dict()
        clean = module_tree.clean_names(self.top, list(state))
        trained = set(module_tree.parameter_names(self.top).values())
        own = module_tree.not_shared(self.top)
        self._parameters.begin()
        self._others.begin()
        self._saved_parameters, self._saved_others = {}, {}
        for raw, value in state.items():
            name = clean[raw]
            if name in trained and isinstance(value, torch.Tensor):
                encoded = self._parameters.add(name, value, own=name in own)
                self._saved_parameters[name] = encoded
            else:
                where = f"{self.key}.{name}"
                self._saved_others[name] = encode(value, where, self._add_other)
        self._parameters.end()
        self._others.end()

    def _add_other(self, path: str, tensor: torch.Tensor) -> Encoded:
        return self._others.add(path.removeprefix(f"{self.key}."), tensor)

    def _collect_others(self) -> None:
        """Buffers and extra state."""
        self._others.begin()
        saved = {
            prefix + name: self._others.add(prefix + name, buffer)
            for prefix, _, module in self._with_buffers
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }
        for prefix, _, module in self._with_extra:
            name = prefix + EXTRA
            where = f"{self.key}.{name}"
            saved[name] = encode(module.get_extra_state(), where, self._add_other)
        self._others.end()
        self._saved_others = saved
        if not self._with_extra:
            self._buffers = Batch(self._others.found)
            self._shape.note_buffers()

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Check that the saved state fits. Return the steps that restore it. Raises StateError."""
        if not isinstance(encoded, dict) or not isinstance(encoded.get("d"), dict):
            raise StateError(f"{self.key}: saved from something that is no torch module")
        values: dict[str, Encoded] = encoded["d"]
        places = list(module_tree.walk(self.top))
        plain = module_tree.is_plain_to_save(self.top)
        if plain:
            for reshard in module_tree.reshards(places):
                reshard()  # the sharded parameters are the optimizer's too
        self.names = module_tree.parameter_names(self.top)
        if not (plain and module_tree.is_plain_to_load(self.top)):
            return [partial(self._load, self._whole_state(saved, values))]
        tensors, extras = _live(places)
        fits(self.key, values, {**tensors, **extras})
        steps: list[Step] = []
        self._restored = values
        placed: dict[Memory, TensorRef] = {}
        for name, value in values.items():
            if name in extras:
                steps.append(partial(extras[name].set_extra_state, decode(value, saved.fresh)))
                continue
            ref = ref_of(value)
            if ref is None:
                raise StateError(f"{self.key}.{name}: what was saved is no tensor")
            steps.append(saved.into(tensors[name], ref))
            local = local_part(tensors[name])
            other = placed.setdefault(memory_of(local), ref) if local.numel() else ref
            cut = saved.resized and (ref.placements or other.placements)
            if other.fqn != ref.fqn and (cut or not _alike(saved, ref, other)):
                raise StateError(
                    f"{ref.fqn} and {other.fqn} are one tensor here, but were saved as two"
                )
        return steps

    def like(self, encoded: Encoded) -> bool:
        """Return True if it has the tensors that were saved, as far as their names tell."""
        if not (module_tree.is_plain_to_save(self.top) and module_tree.is_plain_to_load(self.top)):
            return True
        tensors, extras = _live(list(module_tree.walk(self.top)))
        saved = encoded.get("d") if isinstance(encoded, dict) else None
        return isinstance(saved, dict) and saved.keys() == {*tensors, *extras}

    def parameter_names(self) -> set[str]:
        """Return the names of its parameters."""
        return {
            prefix + name
            for prefix, _, module in module_tree.walk(self.top)
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def live_names(self) -> set[str]:
        """Return the names of all that its state holds now."""
        if not module_tree.is_plain_to_save(self.top):
            state = list(self.top.state_dict())
            return set(module_tree.clean_names(self.top, state).values())
        tensors, extras = _live(list(module_tree.walk(self.top)))
        return {*tensors, *extras}

    def unlike_saved(self) -> list[str]:
        """Return what differed when the restored state was saved, although its tensors fit: frozen
        or tied parameters. A second call returns nothing."""
        saved, self._restored = self._restored, {}
        if not saved:
            return []
        self.collect()
        pairs = {
            name: (ref_of(saved[name]), ref_of(now))
            for name, now in self._saved_parameters.items()
            if name in saved
        }
        kinds: dict[str, list[str]] = {}
        for name, (was, now) in pairs.items():
            if was is None or now is None:
                continue
            if was.frozen != now.frozen:
                kind = "was frozen, not trained" if was.frozen else "was trained, not frozen"
                kinds.setdefault(kind, []).append(name)
            if was.fqn != now.fqn:
                kinds.setdefault("was tied to another parameter, or is now", []).append(name)
        return [f"{self.key}.{_some(names)} {kind}" for kind, names in kinds.items()]

    def _whole_state(self, saved: Assembly, values: dict[str, Encoded]) -> dict[str, Any]:
        """Return the argument of load_state_dict(): new tensors under the names it expects."""
        live = self.top.state_dict()
        clean = module_tree.clean_names(self.top, list(live))
        fits(self.key, values, set(clean.values()))
        state = {}
        for raw, name in clean.items():
            here = live[raw]
            like = here if isinstance(here, torch.Tensor) else None
            state[raw] = decode(values[name], partial(saved.fresh, like=like))
        return state

    def _load(self, state: dict[str, Any]) -> None:
        try:
            self.top.load_state_dict(state)
        except RuntimeError as err:
            raise StateError(f"{self.key}: {err}") from err


def _alike(saved: Assembly, one: TensorRef, other: TensorRef) -> bool:
    """True if two saved tensors hold the same bits."""
    first, second = saved.whole(one.fqn), saved.whole(other.fqn)
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (first, second)))


def _live(places: list[TreeModule]) -> tuple[dict[str, torch.Tensor], dict[str, nn.Module]]:
    """Name → parameter or buffer, and name → module that has extra state."""
    tensors: dict[str, torch.Tensor] = {}
    extras: dict[str, nn.Module] = {}
    for prefix, _, module in places:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in module._non_persistent_buffers_set:
                tensors[prefix + name] = tensor
        if module_tree.has_extra_state(module):
            extras[f"{prefix}{EXTRA}"] = module
    return tensors, extras


def fits(key: str, saved: Collection[str], live: Collection[str]) -> None:
    """Raise StateError where the saved names are not the live ones."""
    missing = [name for name in live if name not in saved]
    unknown = [name for name in saved if name not in live]
    if missing or unknown:
        said = [f"the snapshot lacks {_some(missing)}"] if missing else []
        said += [f"only the snapshot has {_some(unknown)}"] if unknown else []
        raise StateError(f"{key}: {'; '.join(said)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
