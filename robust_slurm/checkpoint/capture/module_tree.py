"""The tree of modules of a model: names without wrappers, and what its modules ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Names under which wrappers keep the module that they wrap: torch.compile, checkpoint_wrapper."""

KNOWN_HOOKS = ("torch.distributed.fsdp.", "torch.distributed.algorithms._checkpoint.")
"""Modules of torch whose hooks are known: they shard the parameters first, or take off a wrapper's
name."""

OWN = ("torch.nn.", "torch.ao.nn.")
"""Modules of torch that override how they are loaded only to read what older versions saved."""


_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


class TreeModule(NamedTuple):
    """One module of the tree."""

    prefix: str
    """Comes before its names, with a dot at the end; "" for the top."""
    raw: str
    """The same with wrappers' names in it."""
    module: nn.Module


def walk(top: nn.Module) -> Iterator[TreeModule]:
    """All modules, as often as they occur, in the order of state_dict()."""
    stack = [TreeModule("", "", top)]
    while stack:
        place = stack.pop()
        yield place
        prefix, raw, module = place
        if not module._modules:
            continue
        parallel = isinstance(module, _PARALLEL)
        for name, child in reversed(module._modules.items()):
            if child is not None:
                bare = (parallel and name == "module") or name in WRAPPERS
                stack.append(
                    TreeModule(prefix if bare else f"{prefix}{name}.", f"{raw}{name}.", child)
                )


def parameter_names(top: nn.Module) -> dict[torch.Tensor, str]:
    """Parameter → its first name."""
    names: dict[torch.Tensor, str] = {}
    for prefix, _, module in walk(top):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, prefix + name)
    return names


def clean_names(top: nn.Module, raw_names: list[str]) -> dict[str, str]:
    """Names that state_dict() gives → the same without wrappers."""
    prefixes = {raw: prefix for prefix, raw, _ in walk(top)}
    cleaned = {}
    for name in raw_names:
        head = name.rpartition(".")[0]
        while head and f"{head}." not in prefixes:
            head = head.rpartition(".")[0]
        raw = f"{head}." if head else ""
        cleaned[name] = prefixes[raw] + name[len(raw) :]
    return cleaned


def not_shared(top: nn.Module) -> set[str]:
    """Names of parameters that DistributedDataParallel was told to leave alone."""
    ignored: set[str] = set()
    for prefix, _, module in walk(top):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            names = set(module.parameters_to_ignore)
            raw = [name for name, _ in module.module.named_parameters(remove_duplicate=False)]
            clean = clean_names(module.module, raw)
            ignored |= {prefix + clean[name] for name in raw if name in names}
    return ignored


def is_fsdp1(top: nn.Module) -> bool:
    """True if parameters are hidden in the flat ones of FullyShardedDataParallel."""
    return any(
        type(module).__module__.startswith("torch.distributed.fsdp.fully_sharded")
        for _, _, module in walk(top)
    )


def is_plain_to_save(top: nn.Module) -> bool:
    """True if state_dict() does nothing but list tensors and extra state."""
    return all(
        type(m).state_dict is nn.Module.state_dict
        and type(m)._save_to_state_dict is nn.Module._save_to_state_dict
        and _known(m._state_dict_hooks)
        and _known(m._state_dict_pre_hooks)
        for _, _, m in walk(top)
    )


def is_plain_to_load(top: nn.Module) -> bool:
    """True if load_state_dict() does nothing but copy into the tensors and set extra state."""
    for _, _, m in walk(top):
        load: Any = type(m)._load_from_state_dict
        if (
            type(m).load_state_dict is not nn.Module.load_state_dict
            or not (load is nn.Module._load_from_state_dict or load.__module__.startswith(OWN))
            or not _known(m._load_state_dict_pre_hooks)
            or not _known(m._load_state_dict_post_hooks)
        ):
            return False
    return True


def _known(hooks: dict[int, Any]) -> bool:
    return not hooks or all(
        str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(KNOWN_HOOKS)
        for hook in hooks.values()
    )


def reshards(places: list[TreeModule]) -> list[Callable[[], object]]:
    """Return the hooks by which FSDP replaces whole parameters by shards, as in state_dict()."""
    return [
        partial(hook, module, raw, False)
        for _, raw, module in places
        for hook in module._state_dict_pre_hooks.values()
    ]


_ATTRIBUTES = attrgetter("__dict__")
_HELD = itemgetter(
    "_modules", "_parameters", "_buffers", "_state_dict_hooks", "_state_dict_pre_hooks"
)


class Shape:
    """The facts that decide what a tree's tensors are and what they are called.

    Modules, parameters, buffers, hooks and the names of all, and the dicts that hold them.
    """

    def __init__(self, places: list[TreeModule]) -> None:
        """``places``: the tree as ``walk`` finds it now."""
        self._modules = [place.module for place in places]
        self._classes = list(map(type, self._modules))
        self._dicts = list(chain.from_iterable(map(_HELD, map(_ATTRIBUTES, self._modules))))
        self._sizes = list(map(len, self._dicts))
        # Most are empty, and stay so as long as the sizes are the same.
        apart = {id(module._buffers) for module in self._modules}
        self._rest = DictContents([held for held in self._dicts if held and id(held) not in apart])
        self._buffers = DictContents([])
        self.note_buffers()

    def note_buffers(self) -> None:
        """Record the buffers as they are now, for ``same_buffers``."""
        self._buffers = DictContents(
            [module._buffers for module in self._modules if module._buffers]
        )
        self._unkept = [
            (module, set(module._non_persistent_buffers_set))
            for module in self._modules
            if module._buffers
        ]

    def unchanged(self) -> bool:
        """True if nothing was added, removed, replaced, moved or renamed since.

        For buffers: only that none was added or removed.
        """
        held = chain.from_iterable(map(_HELD, map(_ATTRIBUTES, self._modules)))
        return (
            all(map(is_, map(type, self._modules), self._classes))
            and all(map(is_, held, self._dicts))
            and list(map(len, self._dicts)) == self._sizes
            and self._rest.unchanged()
        )

    def same_buffers(self) -> bool:
        """True if no buffer was replaced, renamed or declared temporary; valid if ``unchanged``."""
        return self._buffers.unchanged() and all(
            module._non_persistent_buffers_set == names for module, names in self._unkept
        )


class DictContents:
    """The contents of some dicts when this was made."""

    def __init__(self, dicts: list[dict[str, Any]]) -> None:
        self._dicts = dicts
        self._values = list(chain.from_iterable(map(dict.values, dicts)))
        self._keys = list(chain.from_iterable(dicts))

    def unchanged(self) -> bool:
        """True if they hold the same objects under the same names; valid if the sizes are equal."""
        values = chain.from_iterable(map(dict.values, self._dicts))
        keys = chain.from_iterable(self._dicts)
        return all(map(is_, values, self._values)) and all(map(is_, keys, self._keys))


def has_extra_state(module: nn.Module) -> bool:
    """True if the module has more state than its tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state
