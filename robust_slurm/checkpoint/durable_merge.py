"""How the ranks' parts form one checkpoint: which blocks make which tensor, and under which name.

Pure. Ranks of one data-parallel group each hold some row blocks of the same tensors; ranks of a
distributed tensor hold its shards; what is private is whole on every rank. Two pipeline stages may
use one name for different tensors: the one of the lowest rank keeps the name, the others get
``<name>@<lowest rank that has it>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from .alike import Claim, apart
from .durable_parts import Part, Place
from .layout import Entry

DIFFER = "no longer hold the same state, though each has kept a part of it for all"
_STAGES = ("pp", "pipeline", "pipe", "stage")  # names of mesh dimensions over which layers differ


class Chunk(NamedTuple):
    """One rank's block of a tensor."""

    rank: int
    entry: Entry
    place: Place


class Whole(NamedTuple):
    """One tensor as others see it."""

    name: str
    fqn: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    """Without empty ones."""
    path: tuple[str | int, ...]
    """Keys that lead to it in the nested state."""
    kind: str


class Value(NamedTuple):
    """One plain value as others see it."""

    name: str
    path: tuple[str | int, ...]
    rank: int
    place: Place


class Merged(NamedTuple):
    """A whole checkpoint."""

    tensors: tuple[Whole, ...]
    values: tuple[Value, ...]
    problems: tuple[str, ...]
    """Why it is not complete."""
    apart: bool
    """Ranks that share a state no longer hold the same."""


def merge(parts: Sequence[Part]) -> Merged:
    """Merge the parts of all ranks, in the order of ranks."""
    claims = {p.snapshot.rank: Claim(p.snapshot.needs, p.snapshot.same) for p in parts}
    strangers = apart(claims)
    differ = [f"ranks {', '.join(map(str, strangers[:16]))} {DIFFER}"] if strangers else []
    tensors, problems = _tensors(parts)
    return Merged(tuple(tensors), tuple(_values(parts)), (*problems, *differ), bool(strangers))


class _Variant:
    """Blocks of one tensor, while they are collected."""

    def __init__(self, key: tuple[object, ...], first: Chunk, path: tuple[str | int, ...]) -> None:
        self.key = key
        self.path = path
        self.chunks = [first]
        self.starts = {first.entry.offsets} if prod(first.entry.shape) else set()

    def takes(self, key: tuple[object, ...], entry: Entry) -> bool:
        return self.key == key and (not prod(entry.shape) or entry.offsets not in self.starts)

    def add(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        if prod(chunk.entry.shape):
            self.starts.add(chunk.entry.offsets)


def _tensors(parts: Sequence[Part]) -> tuple[list[Whole], list[str]]:
    collected: dict[str, list[_Variant]] = {}
    for part in parts:
        stage = _stage(part)
        for entry, place in zip(part.snapshot.entries, part.places, strict=True):
            chunk = Chunk(part.snapshot.rank, entry, place)
            # The blocks of one tensor come from ranks that need each other (shared) or stand in
            # the same stage (distributed); a private one has no other rank.
            among: object = part.snapshot.rank
            if entry.kind == "shared":
                among = part.snapshot.needs
            elif entry.kind in ("block", "piece"):
                among = stage
            key = (entry.kind, among, entry.dtype, entry.global_shape)
            variants = collected.setdefault(entry.fqn, [])
            for variant in variants:
                if variant.takes(key, entry):
                    variant.add(chunk)
                    break
            else:
                path = tuple(part.paths.get(entry.fqn, (entry.fqn,)))
                variants.append(_Variant(key, chunk, path))
    taken = set(collected)
    tensors, problems = [], []
    for fqn, variants in collected.items():
        for index, variant in enumerate(variants):
            name, path = fqn, variant.path
            if index:
                name = f"{fqn}@{variant.chunks[0].rank}"
                while name in taken:
                    name += "'"
                taken.add(name)
                path = (name,)
            whole = _whole(name, path, variant)
            tensors.append(whole)
            problem = _incomplete(whole)
            if problem:
                problems.append(problem)
    return tensors, problems


def _whole(name: str, path: tuple[str | int, ...], variant: _Variant) -> Whole:
    first = variant.chunks[0].entry
    full = tuple(c for c in variant.chunks if prod(c.entry.shape)) or (variant.chunks[0],)
    return Whole(name, first.fqn, first.dtype, first.global_shape, full, path, first.kind)


def _stage(part: Part) -> tuple[int, ...]:
    """Coordinates of a rank along the mesh's pipeline dimensions."""
    rest, found = part.snapshot.rank, []
    for name, size in reversed(part.snapshot.mesh.items()):
        if size < 1:
            return ()
        rest, here = divmod(rest, size)
        if name in _STAGES:
            found.append(here)
    return tuple(found)


def _incomplete(whole: Whole) -> str:
    """Why the blocks do not cover the tensor exactly once; "" if they do."""
    ranks = ", ".join(str(chunk.rank) for chunk in whole.chunks[:8])
    have = sum(prod(chunk.entry.shape) for chunk in whole.chunks)
    if overlap(chunk.entry for chunk in whole.chunks):
        return (
            f"blocks of {whole.name} from ranks {ranks} overlap; if they are different tensors, "
            "name the mesh's pipeline dimension `pp`"
        )
    if have != prod(whole.shape):
        return (
            f"{whole.name} is not complete: {have} of {prod(whole.shape)} elements, from ranks "
            f"{ranks}"
        )
    return ""


def overlap(entries: Iterable[Entry]) -> bool:
    """Whether any two blocks have an element in common."""
    blocks = [e for e in entries if prod(e.shape)]
    if len(blocks) < 2:
        return False
    if not blocks[0].shape:
        return True
    dims = range(len(blocks[0].shape))
    along = max(dims, key=lambda d: len({block.offsets[d] for block in blocks}))
    blocks.sort(key=lambda block: block.offsets[along])
    active: list[Entry] = []
    for block in blocks:
        start = block.offsets[along]
        active = [a for a in active if a.offsets[along] + a.shape[along] > start]
        for other in active:
            if all(
                block.offsets[d] < other.offsets[d] + other.shape[d]
                and other.offsets[d] < block.offsets[d] + block.shape[d]
                for d in dims
            ):
                return True
        active.append(block)
    return False


def _values(parts: Sequence[Part]) -> list[Value]:
    """Each value from the lowest rank that has it.

    Where ranks have different parameter groups (pipeline stages), their values also stand under
    each parameter's name, as torch's ``flatten_optimizer_state_dict`` asks for them:
    ``optimizer.param_groups.<parameter>.lr``.
    """
    found: dict[str, Value] = {}
    for part in parts:
        for plain in part.plain:
            if plain.name not in found:
                found[plain.name] = Value(plain.name, plain.path, part.snapshot.rank, plain.place)
    if len({part.groups for part in parts if part.groups}) > 1:
        for part in parts:
            for value in _by_parameter(part):
                found.setdefault(value.name, value)
    return list(found.values())


def _by_parameter(part: Part) -> list[Value]:
    values = []
    for group, params in part.groups:
        inside = [p for p in part.plain if p.name.startswith(group + ".")]
        parent = group.rpartition(".")[0]
        for plain in inside:
            key = plain.name[len(group) + 1 :]
            if key == "params":
                continue
            for fqn in params:
                name = f"{parent}.{fqn}.{key}"
                values.append(Value(name, (name,), part.snapshot.rank, plain.place))
    return values
